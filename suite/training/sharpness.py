"""How a deep model fares, layer by layer: the norm of each layer's gradient, the kurtosis of what it gives.

    {"step": 20, "norms": [0.31, 0.02, ...], "kurtosis": [0.1, 0.4, ..., null]}       a line every n steps

The paper (section 5) meets sharp activations, of positive kurtosis, in its deepest models. Kurtosis is that above the
normal distribution's: mean((x - mean)^4) / variance^2 - 3, of the first tensor that a layer gives for the first
micro-batch of the first replica; null for the last layer, whose logits never stand whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from suite.pipeline.action import Action
from suite.pipeline.layers import as_tuple
from suite.pipeline.step import Executor
from suite.training.lines import Lines, reopened


def kurtosis(tensor: Tensor) -> float:
    """Returns the kurtosis of all values of a tensor above the normal distribution's; NaN where they are all equal."""
    x = tensor.detach().float()
    squares = (x - x.mean()).square_()
    variance = squares.mean()
    return float(squares.square_().mean() / variance.square() - 3)


class Sharpness:
    """One worker's part of the record. All workers must call all of it, in the same steps."""

    def __init__(self, executor: Executor, every: int, start: int, path: Path | None) -> None:
        """``path`` is given on the one worker that writes; ``start`` is the step that the run goes on from."""
        self._executor, self._every = executor, every
        self._lines: Lines | None = reopened(path, start) if path is not None else None
        self._seen: dict[int, float] = {}

    def wants(self, step: int) -> bool:
        """Whether a step is recorded: the first, and then every n-th."""
        return step == 0 or (step + 1) % self._every == 0

    @contextmanager
    def looking(self, step: int) -> Iterator[None]:
        """A context in which a step is trained."""
        self._seen.clear()
        stage = self._executor.stage
        hooks = [
            layer.register_forward_hook(self._look(index))
            for index, layer in zip(stage.indices, stage.layers, strict=True)
            if self._executor.place.replica == 0 and self.wants(step)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            action = self._executor.doing.what
            if isinstance(action, Action) and (action.kind, action.micro_batch) == ("F", 0):
                self._seen[index] = kurtosis(as_tuple(output)[0])

        return hook

    def note(self, step: int, norms: tuple[float, ...]) -> None:
        """Writes a recorded step, whose layers' gradients had these norms."""
        if not self.wants(step):
            return
        everybodys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybodys, self._seen)
        if self._lines is None:
            return
        seen = {index: value for one in everybodys for index, value in one.items()}
        self._lines.write({
            "step": step + 1, "norms": [_finite(norm) for norm in norms],
            "kurtosis": [_finite(seen.get(index)) for index in range(len(norms))],
        })  # fmt: skip


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None
