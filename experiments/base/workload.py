"""What the planner needs of a run: its layers, sample micro-batches, pipeline and optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

from torch import nn

from suite.pipeline.planning.profile import Sample
from suite.settings import OptimizerSettings, PipelineSettings


class Measurable(Protocol):
    """A model with sample data: enough to measure its layer costs."""

    @property
    def name(self) -> str:
        """The name that the user gives."""

    @property
    def pipeline(self) -> PipelineSettings:
        """K, M, R, remat."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """Determines the bytes per parameter, and the precision."""

    @property
    def threads(self) -> int | None:
        """Compute threads per stage; None: cores / stages."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def sample(self) -> Sample:
        """Returns sample micro-batches for this M and R."""

    def key(self) -> str:
        """Returns a key that is equal for equal layer costs: of layers, sample, precision, optimizer."""


class Workload(Measurable, Protocol):
    """An experiment, or anything else that can be planned."""

    @property
    def examples(self) -> int:
        """Rows that a step has at least; suggested plans have no more micro-batches."""

    @property
    def most_rows(self) -> int | None:
        """Rows that a step has at most, an upper bound of R x M; None without a bound."""

    @property
    def batch(self) -> int:
        """Tokens, images or other units of one step over all replicas."""

    @property
    def unit(self) -> str:
        """Unit of ``batch``."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""

    def with_pipeline(self, pipeline: PipelineSettings) -> Workload:
        """Returns the same workload with another pipeline."""

    def setting_errors(self) -> list[str]:
        """Returns all contradictions between its settings, apart from the devices."""

    def with_share(self, share: float) -> tuple[Workload, str]:
        """Returns the same workload with a share of its mini-batch, and the setting for it."""


class SingleThreadWorkload:
    """The common part of workloads made only to be measured: one thread per process and the default optimizer."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """The default."""
        return OptimizerSettings()

    @property
    def threads(self) -> int | None:
        """One per process."""
        return 1

    def key(self) -> str:
        """All fields of the workload, a dataclass."""
        return repr(self)


class ExperimentWorkload(ABC):
    """The common part of workloads made from an experiment."""

    experiment: Any

    @abstractmethod
    def with_experiment(self, experiment: Any) -> Self:
        """Returns the workload of another experiment."""

    @property
    def name(self) -> str:
        """As in the registry."""
        return str(self.experiment.name)

    @property
    def pipeline(self) -> PipelineSettings:
        """As set."""
        pipeline: PipelineSettings = self.experiment.pipeline
        return pipeline

    @property
    def optimizer(self) -> OptimizerSettings:
        """As set."""
        optimizer: OptimizerSettings = self.experiment.optimizer
        return optimizer

    @property
    def batch(self) -> int:
        """As set."""
        return int(self.experiment.batch)

    @property
    def unit(self) -> str:
        """Of the task."""
        return str(self.experiment.unit)

    @property
    def steps(self) -> int:
        """As set."""
        return int(self.experiment.train.steps)

    @property
    def threads(self) -> int | None:
        """As set."""
        threads: int | None = self.experiment.train.threads
        return threads

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """The model and its loss."""
        layers, loss = self.experiment.build()
        return layers, loss

    def setting_errors(self) -> list[str]:
        """The experiment's."""
        return list(self.experiment.setting_errors())

    def with_pipeline(self, pipeline: PipelineSettings) -> Self:
        """A copy."""
        return self.with_experiment(self.experiment.model_copy(update={"pipeline": pipeline}))

    def with_settings(self, settings: str) -> Self:
        """A copy with ``field=value`` settings applied. Raises as ``Experiment.with_settings``."""
        return self.with_experiment(self.experiment.with_settings(settings))


def sample_shapes(sample: Sample) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of a sample. Costs depend on them and not on the values."""
    micro_batches = (sample.typical, sample.largest)
    return [[tuple(tensor.shape) for tensor in (*batch.inputs, *batch.targets)] for batch in micro_batches]


def update_key(optimizer: OptimizerSettings) -> tuple[str, str, bool]:
    """Returns the optimizer settings that costs depend on."""
    return optimizer.name, optimizer.precision, optimizer.max_grad_norm is not None
