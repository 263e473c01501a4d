"""One fully resolved run: every number that its result depends on, immutable, saved with it as ``experiment.toml``.

This is the common part. A task is a folder beside this one, with a subclass of ``Experiment`` that has its settings,
layers, loss, data and scales; ``registry.TASKS`` names it. Training and planning do not ask which task a run has; the
commands for one task do (score, translate, generate, export).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import PrivateAttr, ValidationError, model_validator
from torch import nn

from experiments.base import overrides
from experiments.base.cluster import Cluster
from experiments.base.data_source import DataSource
from experiments.base.setting_faults import contradictions, unreached
from suite.errors import SettingError
from suite.log import Log
from suite.paths import hide_secrets
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.sample import Sample
from suite.pipeline.schedule import csv_file
from suite.settings import FrozenRecord, LoopSettings, OptimizerSettings, PipelineSettings, TrackingSettings
from suite.training.trackers import Tracker
from suite.training.validation import Criterion

FORMAT = 5
"""Of an experiment's file. Raise it when settings are renamed or removed: runs of another format are refused."""


class Experiment(FrozenRecord):
    """A named run of any task.

    Raises SettingError when two fields contradict each other, pydantic's ValidationError for a wrong type or name.
    """

    unit: ClassVar[str]
    """Unit of a mini-batch: tokens, images or rows."""
    metric_name: ClassVar[str]
    """The metric that the loss reports per unit, beside its objective: nll or accuracy."""
    criterion: ClassVar[Criterion]
    """What decides which validation is the best."""
    unchangeable: ClassVar[tuple[str, ...]]
    """Sections that a resumed run cannot change: the model and the data."""
    data_setting: ClassVar[str]
    """The one that names the text or image set, of tasks whose data may be replaced by other data."""
    batch_setting: ClassVar[tuple[str, int]]
    """The one of ``train`` for the size of a mini-batch, and its least value."""
    new_last_layer: ClassVar[bool] = False
    """Whether ``train.init_from`` leaves the last layer out even where its shapes are equal."""

    task: str
    name: str
    scale: Literal["paper", "laptop", "slice", "tiny"]
    pipeline: PipelineSettings
    optimizer: OptimizerSettings
    train: LoopSettings
    tracking: TrackingSettings = TrackingSettings()
    trace: bool = False
    """Whether all steps are traced, not a few."""
    shrunk: tuple[str, ...] = ()
    """How its scale changed a run of the paper (``changes_from``)."""

    _prepared: Path | None = PrivateAttr(default=None)
    """Folder of the prepared data that samples are taken from; no setting."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if errors := [*self.setting_errors(), *contradictions(self.pipeline, self.train, self.list_length)]:
            raise SettingError("; ".join(errors))
        return self

    def setting_errors(self) -> list[str]:
        """Returns all contradictions between the task's own settings."""
        return []

    @property
    def title(self) -> str:
        return f"{self.name} at scale {self.scale}"

    @property
    @abstractmethod
    def list_length(self) -> int:
        """Layers of the model."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Approximate units of a mini-batch over all replicas."""

    @property
    @abstractmethod
    def data(self) -> str:
        """The name of the text or image set."""

    def with_data(self, name: str) -> Self:
        """Returns a copy on another text or image set."""
        return self.with_settings([f"{self.data_setting}={name}"])

    @abstractmethod
    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def own_layers(self, device: torch.device) -> list[nn.Module]:
        """Returns the layers of a user's function, with their initial values; empty for a model of the suite."""
        return []

    @property
    @abstractmethod
    def min_rows(self) -> int:
        """Rows that a step has at least; suggested plans have no more micro-batches."""

    @property
    def max_rows(self) -> int:
        """Rows that a step has at most, an upper bound of R x M."""
        return self.min_rows

    def with_batch_fraction(self, fraction: float) -> tuple[Self, str]:
        """Returns a copy with a fraction of its mini-batch, and the setting for it."""
        name, least = self.batch_setting
        setting = f"train.{name}={max(least, int(getattr(self.train, name) * fraction))}"
        return self.with_settings(setting), setting

    @abstractmethod
    def sample(self) -> Sample:
        """Returns sample micro-batches for this M and R, of the prepared data if the task needs that."""

    @abstractmethod
    def key(self) -> str:
        """Returns a key that is equal for equal layer costs: of layers, sample and update (``cost_key``)."""

    def cost_key(self, *model: object) -> str:
        """Returns the key: what describes the model, the shapes of the sample, on whose values costs do not depend, and
        the settings of the optimizer on which they do."""
        sample, optimizer = self.sample(), self.optimizer
        micro_batches = (sample.typical, sample.largest)
        shapes = [[tuple(tensor.shape) for tensor in (*batch.inputs, *batch.targets)] for batch in micro_batches]
        update = (optimizer.name, optimizer.precision, optimizer.max_grad_norm is not None)
        return repr((*model, shapes, update))

    def data_errors(self) -> list[str]:
        """Returns what the prepared data contradicts. Raises SettingError for a language that it lacks."""
        return []

    def trial_errors(self) -> list[str]:
        """Returns all faults of the task's own settings, of its data, and of layers that are tried."""
        return [*self.setting_errors(), *self.data_errors()]

    def remarks(self) -> Iterator[str]:
        """Yields which settings have no effect because the run is short, or the data small."""
        return unreached(self.train, self.optimizer)

    @property
    def sample_note(self) -> str:
        """What a sample without prepared data assumes; empty if it is the same with it."""
        return ""

    def check_data(self) -> None:
        """Raises DataError for a text or image set that is no known name and no folder. Fetches nothing."""

    @abstractmethod
    def data_folder(self, cache: Path) -> Path:
        """Returns the folder of its prepared data below the cache."""

    @abstractmethod
    def prepare_data(self, cache: Path, log: Log) -> str:
        """Prepares the data and returns its name, which differs from the setting if a fallback was used.

        Raises DataError when the data is not available.
        """

    @abstractmethod
    def data_source(self, data: Path, coord: RankCoord) -> DataSource:
        """Returns the data of a worker; all workers must call it."""

    def at_laptop_scale(self, cluster: Cluster) -> Experiment:
        """Returns the run at scale ``laptop``, small enough for a few cores; one designed for a laptop as it is."""
        return self

    def at_slice_scale(self, cluster: Cluster) -> Experiment:
        """Returns the run at scale ``slice``. Raises SettingError for one that has none."""
        raise SettingError(f"{self.name} has no scale slice, which is for the paper's translation runs; omit SCALE")

    @property
    def threads(self) -> int | None:
        """Compute threads per stage; None: cores / stages."""
        return self.train.threads

    def with_pipeline(self, pipeline: PipelineSettings) -> Self:
        return self.model_copy(update={"pipeline": pipeline})

    def with_section(self, name: str, **changes: Any) -> Self:
        """Returns a copy with other values in a section of settings, such as ``pipeline``; they are not checked."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=changes)})

    def with_prepared(self, folder: Path) -> Self:
        """Returns a copy that takes its samples from the prepared data in this folder."""
        copy = self.model_copy()
        copy._prepared = folder
        return copy

    def stages_on(self, cluster: Cluster) -> int:
        """Returns K at a small scale: at most the number of devices. On cores, which workers can share, a run that the
        paper pipelines keeps at least 2 stages."""
        least = min(self.pipeline.stages, 2) if cluster.kind == "cpu" else 1
        return max(min(self.pipeline.stages, cluster.devices), least)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What the loss reports beside its objective."""
        return (self.metric_name,)

    def metric_of(self, line: Mapping[str, Any]) -> str:
        """Returns ``metric_name``, given the metrics of a step; executes no code of others."""
        return self.metric_name

    def listed(self, summary: str) -> str:
        """Returns what ``gpipe list`` says of it, given the summary of the function that makes it."""
        return f"{self.name} ({self.data}): {summary}"

    def layers_changed(self, notes: Mapping[str, Any]) -> str:
        """Returns a warning if the layers may differ from those of a checkpoint with these notes on its data."""
        return ""

    def trackers(self) -> list[Tracker]:
        """Returns those of the task alone."""
        return []

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Returns the factors of the learning rate and of the weight decay of a parameter, such as ``3.weight``."""
        return 1.0, 1.0

    def with_settings(self, settings: str | Iterable[str]) -> Self:
        """Returns a copy with ``field=value`` settings, such as ``"train.steps=50 pipeline.stages=4"``, applied.

        Raises SettingError with the field, its type and the given value, or with the closest names of an unknown field.
        """
        parsed = overrides.parse(settings, type(self))
        given = self.with_derived({**parsed})
        values = self.model_dump()
        for path, value in given.items():
            section, _, field = path.partition(".")
            if field:
                values[section][field] = value
            else:
                values[section] = value
        changed = self.validated(values, given.keys() - parsed.keys())
        return changed if self._prepared is None else changed.with_prepared(self._prepared)

    def with_derived(self, given: dict[str, Any]) -> dict[str, Any]:
        """Adds the settings that follow from the given ones: a decay to 0 that ended with the run still does, and a
        schedule's file determines K, M and the cells.

        Raises SettingError for a file that is no valid schedule.
        """
        given = _with_schedule_file(given)
        rates, is_new = self.optimizer, "optimizer.lr_decay" in given
        decay, after_warmup = given.get("optimizer.lr_decay", rates.lr_decay), self.train.steps - rates.warmup_steps
        paths = "train.steps", "optimizer.warmup_steps", "optimizer.lr_decay_steps"
        before = self.train.steps, rates.warmup_steps, rates.lr_decay_steps
        if not given.keys() & {"optimizer.lr_decay", *paths}:
            return given
        with suppress(ValueError):  # not a number: validation reports it
            steps, warmup, decay_steps = (int(given.get(path, old)) for path, old in zip(paths, before, strict=True))
            if decay in ("cosine", "linear") and (is_new or rates.lr_decay_steps == max(1, after_warmup)):
                return {"optimizer.lr_decay_steps": max(1, steps - warmup), **given}
            if decay == "wsd" and (is_new or rates.lr_stable_steps == max(0, after_warmup - rates.lr_decay_steps)):
                if is_new and "optimizer.lr_decay_steps" not in given:
                    decay_steps = max(1, steps // 10)
                    given = {**given, "optimizer.lr_decay_steps": decay_steps}
                return {"optimizer.lr_stable_steps": max(0, steps - warmup - decay_steps), **given}
        return given

    def changes_from(self, before: Experiment) -> list[str]:
        """Returns a line for each setting that differs from that of another experiment, such as ``model.width 1024 ->
        64``."""
        new = self.model_dump()
        return [
            f"{section}.{field} {_short(value)} -> {_short(new[section][field])}"
            for section, values in before.model_dump().items()
            if isinstance(values, dict)
            for field, value in values.items()
            if value != new[section][field]
        ]

    def with_changes_from(self, paper: Experiment) -> Self:
        """Returns a copy with every difference from the paper's numbers in ``shrunk``."""
        return self.model_copy(update={"shrunk": tuple(self.changes_from(paper))})

    def is_finished(self, record: dict[str, Any]) -> bool:
        """Whether the run with this ``record.json`` has nothing left to train: it did all steps, or its validations did
        not improve for as long as ``train.patience`` says."""
        if record["steps"] >= self.train.steps:
            return True
        patience, unimproved = self.train.patience, record.get("validations_without_improvement", 0)
        return bool(record.get("stopped_early")) and patience is not None and unimproved >= patience

    def to_toml(self) -> str:
        """Returns the experiment as TOML; omits fields that are None."""
        import tomli_w  # here: gpu-check runs without it

        return tomli_w.dumps({"format": FORMAT, **self.model_dump(exclude_none=True)})

    @classmethod
    def validated(cls, values: dict[str, Any], derived: Collection[str] = ()) -> Self:
        """Returns the experiment with these values. Raises SettingError with all faults, those of ``derived`` settings
        only if there are no others."""
        try:
            return cls.model_validate(values)
        except ValidationError as fault:
            raise overrides.as_setting_error(fault, cls, derived) from None

    @classmethod
    def restored(cls, values: dict[str, Any]) -> Self:
        """Returns the experiment that ``to_toml`` wrote: an omitted optional field is None, whatever its default."""
        for path, kind in overrides.paths(cls).items():
            section, _, field = path.partition(".")
            if overrides.may_be_none(kind) and isinstance(values.get(section), dict):
                values[section].setdefault(field, None)
        return cls.validated(values)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else hide_secrets(str(value))


def _with_schedule_file(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces ``pipeline.schedule=<path>.csv`` by the schedule in the file; settings of K and M beside it stay, and
    are compared with the file's."""
    schedule = given.get("pipeline.schedule")
    if schedule is None:
        return given
    if not schedule.endswith(csv_file.SUFFIX):
        return {"pipeline.schedule_rows": None, **given}
    rows = csv_file.read_rows(Path(schedule).expanduser())
    shape = {f"pipeline.{name}": value for name, value in csv_file.shape(rows).items()}
    return {**shape, **given, "pipeline.schedule": "csv", "pipeline.schedule_rows": rows}
