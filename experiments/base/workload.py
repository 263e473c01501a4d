"""What is measured: layers with sample micro-batches, a pipeline and an optimizer. An experiment is one."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from suite.pipeline.planning.sample import Sample
from suite.settings import OptimizerSettings, PipelineSettings


class Measurable(Protocol):
    """A model with sample data: enough to measure its layer costs."""

    @property
    def name(self) -> str: ...

    @property
    def pipeline(self) -> PipelineSettings: ...

    @property
    def optimizer(self) -> OptimizerSettings: ...

    @property
    def threads(self) -> int | None:
        """Compute threads per stage; None: cores / stages."""

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        """Returns the layers, on the meta device, and the loss."""

    def sample(self) -> Sample:
        """Returns sample micro-batches for this M and R."""

    def key(self) -> str:
        """Returns a key that is equal for equal layer costs: of layers, sample, precision, optimizer."""


class SingleThreadWorkload:
    """The common part of workloads made only to be measured: one thread per process and the default optimizer."""

    optimizer = OptimizerSettings()
    threads = 1

    def key(self) -> str:
        """All fields of the workload, a dataclass."""
        return repr(self)


FIRST_WORD = 4
"""The first token id of a word; lower ids are special tokens."""


def random_ids(rows: int, time: int, vocabulary: int) -> Tensor:
    """Returns (rows, time) int64 word ids, always the same; costs do not depend on the words."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(FIRST_WORD, vocabulary - 1), vocabulary, (rows, time), generator=generator)
