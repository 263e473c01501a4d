"""A run of a TrainSpec, the layers and data of somebody else's file or package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from experiments.base import overrides
from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.custom.batches import SpecBatches
from experiments.custom.loading import Source, absolute, called, description, digest, load_spec, made_spec
from experiments.custom.loss import metrics_of, units_of
from experiments.custom.source import CustomSource
from experiments.custom.spec_model import build, first_batch, layer_errors, update_factors
from suite.errors import SettingError, SuiteError
from suite.log import Log
from suite.pipeline.model.layer_copy import copied
from suite.pipeline.model.layers import Tensors, empty_on, reset_all
from suite.pipeline.model.microbatch import even_split_sizes
from suite.pipeline.model.rng import initial_seed, seeded
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import CustomTrainSettings, OptimizerSettings, PipelineSettings
from suite.train_spec import TrainSpec
from suite.training.metrics import own_metrics
from suite.training.trackers import Tracker, Values
from suite.training.validation import Criterion


class CustomExperiment(Experiment):
    """``source`` is path.py:function or package.module:function; the function returns the TrainSpec."""

    unit: ClassVar[str] = "rows"
    criterion: ClassVar[Criterion] = Criterion("loss")
    """Not the metric: whether more of it is better is unknown."""
    unchangeable: ClassVar[tuple[str, ...]] = ("source",)
    batch_setting: ClassVar[tuple[str, int]] = ("batch_rows", 1)

    task: Literal["custom"] = "custom"
    source: str
    layer_count: int
    """Layers of the model, so that a record can be read without the function."""
    train: CustomTrainSettings

    @property
    def spec(self) -> TrainSpec:
        """What the function returns, with this seed's initial values. Raises SettingError when it fails."""
        return load_spec(self.source, self.train.seed)

    @property
    def title(self) -> str:
        return self.name

    @property
    def metric_name(self) -> str:  # type: ignore[override]
        return self.metric_names[0]

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(metrics_of(self.spec)) or ("loss",)

    def metric_of(self, line: Mapping[str, Any]) -> str:
        """From the line: ``metric_name`` would execute the function."""
        return own_metrics(line, self.unit)[0]

    def listed(self, summary: str) -> str:
        return f"{self.name} ({self.source}): {description(self.source)}"

    def layers_changed(self, notes: Mapping[str, Any]) -> str:
        changed = f"{self.source} has changed since the run; its layers are as they are now"
        return "" if notes.get("source") == digest(self.source) else changed

    @property
    def list_length(self) -> int:
        return self.layer_count

    @property
    def batch(self) -> int:
        return self.train.batch_rows

    @property
    def data(self) -> str:
        return self.source

    def batches(self) -> SpecBatches:
        return SpecBatches(self.spec, self.train.batch_rows, self.train.seed)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Returns what the spec's ``param_groups`` does of the user's own parameter, of which ``parameter`` is a copy.
        Raises SettingError unless that is two numbers."""
        return update_factors(self.spec, name)

    def trackers(self) -> list[Tracker]:
        on_step = self.spec.on_step
        return [StepHook(self.source, on_step)] if on_step is not None else []

    @property
    def min_rows(self) -> int:
        return len(self._first_batch()[0][0])

    def _first_batch(self) -> tuple[Tensors, Tensors]:
        return first_batch(self.source, self.train.seed, self.train.batch_rows)

    def sample(self) -> Sample:
        inputs, targets = self._first_batch()
        parts = even_split_sizes(len(inputs[0]), self.pipeline.replicas * self.pipeline.micro_batches)
        typical, largest = (
            MicroBatch(tuple(t[:rows] for t in inputs), tuple(t[:rows] for t in targets))
            for rows in (parts[len(parts) // 2], parts[0])
        )
        return Sample(typical, largest, units_of(self.spec, typical.targets or typical.inputs))

    def key(self) -> str:
        """The file of the function, the layers, the shapes of the sample, and the update."""
        return self.cost_key(self.source, digest(self.source), *self.build())

    def trial_errors(self) -> list[str]:
        """What the layers, the loss and the data stumble over, tried on the rows of the smallest micro-batch."""
        try:
            least = even_split_sizes(self.min_rows, self.pipeline.replicas * max(1, self.pipeline.micro_batches))[-1]
        except SuiteError as error:
            return [str(error)]
        errors = [*layer_errors(self.source, self.train.seed, self.train.batch_rows, least)]
        if self.train.validate_every is not None and self.spec.valid is None:
            errors.append(
                f"train.validate_every={self.train.validate_every}, but {self.source} has no held-out data; set valid "
                "of its TrainSpec, or train.validate_every=none"
            )
        return errors

    def remarks(self) -> Iterator[str]:
        yield from super().remarks()
        data, rows = self.spec.train, self.train.batch_rows
        if isinstance(data, Sized) and len(data) < rows:
            yield f"train.batch_rows={rows:,} of {len(data):,} rows: a step takes rows several times; use {len(data)}"

    def data_folder(self, cache: Path) -> Path:
        """The cache itself: the function reads its data from where it likes."""
        return cache

    def prepare_data(self, cache: Path, log: Log) -> str:
        return self.data

    def data_source(self, data: Path, coord: RankCoord) -> CustomSource:
        return CustomSource(self, coord)

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the spec's layers on the meta device, and its loss. Raises SettingError when their number is not
        that of the run."""
        layers, loss = build(self.spec)
        if len(layers) != self.layer_count:
            raise SettingError(
                f"{self.source} returns {len(layers)} layers, and this run has {self.layer_count}; change it back, or "
                "start a new run"
            )
        return layers, loss

    def own_layers(self, device: torch.device) -> list[nn.Module]:
        """Returns the function's own objects; those on the meta device get values, the first of shared ones last."""
        layers = list(made_spec(self.source, self.train.seed).layers)
        tensors = [(*layer.parameters(), *layer.buffers()) for layer in layers]
        bare = [at for at, several in enumerate(tensors) if any(tensor.is_meta for tensor in several)]
        if bare:
            made = copied(nn.ModuleList(layers[at] for at in bare), partial(empty_on, device))
            for at, layer in reversed([*zip(bare, made, strict=True)]):  # type: ignore[call-overload]
                layers[at] = layer
                with seeded(initial_seed(self.train.seed, at), device):
                    reset_all(layer)
        return [layer.to(device) for layer in layers]


class StepHook:
    """Calls ``on_step`` of the TrainSpec that ``source`` returns."""

    def __init__(self, source: str, on_step: Callable[[int, dict[str, float]], object]) -> None:
        self._source, self._on_step = source, on_step

    def log(self, step: int, values: Values) -> None:
        what = f"on_step of {self._source}, called after step {step},"
        called(lambda: self._on_step(step, dict(values)), Source.parse(self._source).place, what)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Calls nothing."""


def find_custom(source: str, name: str = "") -> CustomExperiment:
    """Returns the experiment of ``path.py:function`` or ``package.module:function`` with the numbers of its TrainSpec.
    Its name is the function's unless given.

    Raises SettingError when the function does not exist, fails, or returns something else.
    """
    source = absolute(source)
    spec = load_spec(source, 0)
    values = {
        "name": name or Source.parse(source).function,
        "scale": "laptop",
        "source": source,
        "layer_count": len(spec.layers),
        "pipeline": PipelineSettings(schedule="auto"),
        "optimizer": OptimizerSettings(),
        "train": CustomTrainSettings(),
    }
    settings = [f"pipeline.{name}={getattr(spec, name)}" for name in ("stages", "micro_batches", "replicas")]
    settings += [f"train.steps={spec.steps}", f"train.batch_rows={spec.batch_size}"]
    if not isinstance(spec.settings, str):
        raise SettingError(
            f"settings of {source} is a {type(spec.settings).__name__}; write one text, as {option('SET')} takes it"
        )
    return CustomExperiment.validated(values).with_settings([*settings, *overrides.split(spec.settings)])
