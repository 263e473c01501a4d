"""What a plan asks of a run: its layers, micro-batches to measure with, and how it is piped and updated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

from torch import nn

from suite.pipeline.profile import Sample
from suite.settings import OptimizerSettings, PipelineSettings


class Measurable(Protocol):
    """What can be measured and run: enough to price its layers."""

    @property
    def name(self) -> str:
        """What it is asked for by."""

    @property
    def pipeline(self) -> PipelineSettings:
        """K, M, R, remat."""

    @property
    def optimizer(self) -> OptimizerSettings:
        """Decides the bytes that stand for each parameter, and the precision."""

    @property
    def threads(self) -> int | None:
        """Compute threads of a stage; None: the cores shared out."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def sample(self) -> Sample:
        """Returns micro-batches at this M and R."""

    def key(self) -> str:
        """Returns a text that is the same for works with the same layer costs: layers, sample, precision, optimizer."""


class Workload(Measurable, Protocol):
    """An experiment, or anything else that can be planned whole."""

    @property
    def examples(self) -> int:
        """Rows that a step surely has: what is suggested cuts it into no more."""

    @property
    def most_rows(self) -> int | None:
        """Rows that a step has at most: R x M cannot be more. None where there is no such bound."""

    @property
    def batch(self) -> int:
        """Tokens, images or other units of one step over all replicas."""

    @property
    def unit(self) -> str:
        """What is counted."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""

    def with_pipeline(self, pipeline: PipelineSettings) -> Workload:
        """Returns the same work, piped otherwise."""

    def faults(self) -> list[str]:
        """Returns all in which its settings contradict each other, but for the devices'."""

    def with_share(self, share: float) -> tuple[Workload, str]:
        """Returns the same work with that share of its mini-batch, and the setting that makes it so."""


class OfExperiment(ABC):
    """What a workload that is an experiment says of itself; ``remade`` is the same on another experiment."""

    experiment: Any

    @abstractmethod
    def remade(self, experiment: Any) -> Self:
        """Returns the same work with other settings."""

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

    def faults(self) -> list[str]:
        """The experiment's."""
        return list(self.experiment.faults())

    def with_pipeline(self, pipeline: PipelineSettings) -> Self:
        """A copy."""
        return self.remade(self.experiment.model_copy(update={"pipeline": pipeline}))


def shapes(sample: Sample) -> list[list[tuple[int, ...]]]:
    """Returns the shapes of a sample: costs depend on them, and not on the words."""
    return [[tuple(t.shape) for t in (*one.inputs, *one.targets)] for one in (sample.typical, sample.largest)]


def update_key(optimizer: OptimizerSettings) -> tuple[str, str, bool]:
    """Returns what costs depend on of an optimizer: not its rates."""
    return optimizer.name, optimizer.precision, optimizer.clip_norm is not None
