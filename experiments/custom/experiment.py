"""A run of a TrainSpec, the layers and data of somebody else's file or package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from torch import nn

from experiments.base import overrides
from experiments.base.experiment import Experiment
from experiments.base.hints import option
from experiments.custom.batches import SpecBatches
from experiments.custom.layers import all_on_meta, tie_shared
from experiments.custom.loading import Source, absolute, called, load_spec
from experiments.custom.loss import SummedLoss, metrics_of
from suite.errors import SettingError, first_line
from suite.settings import CustomTrainSettings, OptimizerSettings, PipelineSettings
from suite.train_spec import TrainSpec
from suite.training.trackers import Tracker, Values
from suite.training.validation import Criterion


class CustomExperiment(Experiment):
    """``source`` is path.py:function or package.module:function; the function returns the TrainSpec."""

    unit: ClassVar[str] = "rows"
    criterion: ClassVar[Criterion] = Criterion("loss")
    """Not the metric: whether more of it is better is unknown."""
    fixed: ClassVar[tuple[str, ...]] = ("source",)

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
        """Its name; it has one scale alone."""
        return self.name

    @property
    def metric_name(self) -> str:  # type: ignore[override]
        """The first of the spec's metrics, otherwise ``loss``."""
        return self.metric_names[0]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Those of the spec's metrics; ``loss`` if it has none."""
        return tuple(metrics_of(self.spec)) or ("loss",)

    @property
    def list_length(self) -> int:
        """As many as the spec has."""
        return self.layer_count

    @property
    def batch(self) -> int:
        """Rows."""
        return self.train.batch_rows

    @property
    def data(self) -> str:
        """The function, which also makes the data."""
        return self.source

    def with_data(self, name: str) -> Self:
        """Returns a copy of another function."""
        return self.model_copy(update={"source": name})

    def batches(self) -> SpecBatches:
        """Returns the mini-batches."""
        return SpecBatches(self.spec, self.train.batch_rows, self.train.seed)

    def update_factors(self, name: str, parameter: nn.Parameter) -> tuple[float, float]:
        """Returns what the spec's ``param_groups`` does. Raises SettingError unless that is two numbers."""
        return update_factors(self.spec, name, parameter)

    def trackers(self) -> list[Tracker]:
        """Returns one that calls the spec's ``on_step``."""
        on_step = self.spec.on_step
        return [StepHook(self.source, on_step)] if on_step is not None else []

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


class StepHook:
    """Calls ``on_step`` of the TrainSpec that ``source`` returns."""

    def __init__(self, source: str, on_step: Callable[[int, dict[str, float]], object]) -> None:
        self._source, self._on_step = source, on_step

    def log(self, step: int, values: Values) -> None:
        """Calls it. Raises SettingError when it fails."""
        what = f"on_step of {self._source}, called after step {step},"
        called(lambda: self._on_step(step, dict(values)), Source.parse(self._source).place, what)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Calls nothing."""


def build(spec: TrainSpec) -> tuple[list[nn.Module], nn.Module]:
    """Returns the layers on the meta device, and the loss. Raises SettingError for layers that cannot be used."""
    layers = list(spec.layers)
    tie_shared(layers)
    _, targets = SpecBatches(spec, rows=1, seed=0).whole(0)
    return all_on_meta(layers), SummedLoss(spec, len(targets))


def update_factors(spec: TrainSpec, name: str, parameter: nn.Parameter) -> tuple[float, float]:
    """Returns the factors of the learning rate and of the weight decay of a parameter, such as ``3.weight``.

    Raises SettingError when ``param_groups`` fails, or returns anything else than two numbers, 0 or more.
    """
    if spec.param_groups is None:
        return 1.0, 1.0
    try:
        found = spec.param_groups(name, parameter)
    except Exception as error:
        raise SettingError(f"param_groups failed for {name}: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(found, tuple | list) and len(found) == 2:
        lr_factor, decay_factor = found
        if all(isinstance(factor, int | float) and 0 <= factor < math.inf for factor in found):
            return float(lr_factor), float(decay_factor)
    raise SettingError(
        f"param_groups returned {' '.join(repr(found).split())[:100]} for {name}; return the factors of its learning "
        "rate and of its weight decay, two numbers, 0 or more"
    )


def find_custom(source: str, name: str = "") -> CustomExperiment:
    """Returns the experiment of ``path.py:function`` or ``package.module:function`` with the numbers of its TrainSpec.
    Its name is the function's unless given.

    Raises SettingError when the function does not exist, fails, or returns something else.
    """
    source = absolute(source)
    spec = load_spec(source, 0)
    values = {
        "name": name or Source.parse(source).function, "scale": "laptop", "source": source,
        "layer_count": len(spec.layers),
        "pipeline": PipelineSettings(),
        "optimizer": OptimizerSettings(),
        "train": CustomTrainSettings(),
    }  # fmt: skip
    given = {
        "pipeline.stages": spec.stages, "pipeline.micro_batches": spec.micro_batches,
        "pipeline.replicas": spec.replicas, "train.steps": spec.steps, "train.batch_rows": spec.batch_size,
    }  # fmt: skip
    if not isinstance(spec.settings, str):
        raise SettingError(
            f"settings of {source} is a {type(spec.settings).__name__}; write one text, as {option('SET')} takes it"
        )
    settings = [f"{path}={value}" for path, value in given.items()]
    return CustomExperiment.validated(values).with_settings([*settings, *overrides.split(spec.settings)])
