"""Statistics of each layer of a deep model: the gradient norm and the kurtosis of the output.

    {"step": 20, "norms": [0.31, 0.02, ...], "kurtosis": [0.1, 0.4, ..., null]}       one line every n steps

The paper (section 5) finds sharp activations, with positive kurtosis, in its deepest models. This is the excess
kurtosis, mean((x - mean)^4) / variance^2 - 3, of the first tensor that a layer returns for the first micro-batch of the
first replica. It is null for the last layer, whose full logits never exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from suite.exchange import gather
from suite.pipeline.model.layers import as_tuple
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.schedule.action import Action
from suite.training.jsonl import JsonLinesFile, reopen


def kurtosis(tensor: Tensor) -> Tensor:
    """Returns the excess kurtosis over all values of a tensor, a scalar on its device; NaN if they are all equal."""
    x = tensor.detach().float()
    squares = (x - x.mean()).square_()
    variance = squares.mean()
    return squares.square_().mean() / variance.square() - 3


class LayerStats:
    """Records the statistics of one worker's layers. All workers must call every method, in the same steps."""

    def __init__(self, executor: Executor, every: int, start: int, path: Path | None) -> None:
        """``path`` is None on all workers but the one that writes; ``start`` is the step that the run resumes from."""
        self._executor, self._every = executor, every
        self._lines: JsonLinesFile | None = reopen(path, start) if path is not None else None
        self._kurtosis: dict[int, Tensor] = {}

    def due(self, step: int) -> bool:
        """Whether to record this step: the first, and then every n-th."""
        return step == 0 or (step + 1) % self._every == 0

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Records the outputs of the step that is trained in this context."""
        self._kurtosis.clear()
        stage = self._executor.stage
        hooks = [
            layer.register_forward_hook(self._make_hook(index))
            for index, layer in zip(stage.indices, stage.layers, strict=True)
            if self._executor.coord.replica == 0 and self.due(step)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _make_hook(self, index: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            action = self._executor.status.action
            if isinstance(action, Action) and (action.kind, action.micro_batch) == ("F", 0):
                self._kurtosis[index] = kurtosis(as_tuple(output)[0])

        return hook

    def write(self, step: int, norms: tuple[float, ...]) -> None:
        """Gathers and writes the record of a step; ``norms`` are the gradient norms of all layers."""
        if not self.due(step):
            return
        per_worker = gather([(index, float(value)) for index, value in self._kurtosis.items()])
        if self._lines is None:
            return
        per_layer = {index: value for pairs in per_worker for index, value in pairs}
        self._lines.write({
            "step": step + 1, "norms": [_finite(norm) for norm in norms],
            "kurtosis": [_finite(per_layer.get(index)) for index in range(len(norms))],
        })  # fmt: skip


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
