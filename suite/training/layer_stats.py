"""Statistics of each layer of a deep model, one line every n steps:

    {"step": 20,
     "norms":      [0.31, 0.02, ...]         the gradient norm
     "kurtosis":   [0.10, 0.40, ..., null]   of the output
     "output_rms": [1.20, 1.21, ..., null]   the root mean square of the output
     "change_rms": [0.05, 0.01, ..., null]}  and of its change through the step's update, for the same input

The output is the first tensor that a layer returns for the first micro-batch of the first replica. Its kurtosis is in
excess of the normal distribution's: mean((x - mean)^4) / variance^2 - 3. The paper (section 5) finds it positive in its
deepest models. For the change the layer runs twice more, before and after the update: in evaluation mode, with the same
buffers, and in fp32, because the rounding of bf16 is larger than most changes. A last layer with ``gpipe_score`` has
only a norm: its full logits never exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from suite.exchange import all_gather
from suite.pipeline.model.changing_buffers import copies_of_buffers
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.schedule.action import Action
from suite.training.jsonl import JsonLinesFile, reopen

_NAMES = ("kurtosis", "output_rms", "change_rms")


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
        self._inputs: dict[int, Tensors] = {}
        self._stats: dict[int, tuple[Tensor, ...]] = {}

    def due(self, step: int) -> bool:
        """Whether to record this step: the first, and then every n-th."""
        return step == 0 or (step + 1) % self._every == 0

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Records the layers' inputs and outputs of the step that is trained in this context."""
        with ExitStack() as hooks:
            if self._executor.coord.replica == 0 and self.due(step):
                for index, layer in self._executor.stage.by_index.items():
                    hooks.enter_context(layer.register_forward_pre_hook(partial(self._record_inputs, index)))
                    hooks.enter_context(layer.register_forward_hook(partial(self._record_output, index)))
            yield

    def _record_inputs(self, index: int, module: nn.Module, inputs: Tensors) -> None:
        if self._is_first_forward():
            # copies, made before the forward: a layer may work in place
            self._inputs[index] = tuple(tensor.detach().clone() for tensor in inputs)

    def _record_output(self, index: int, module: nn.Module, inputs: Tensors, output: Tensor | Tensors) -> None:
        if self._is_first_forward():
            first = as_tuple(output)[0]
            self._stats[index] = kurtosis(first), _rms(first)

    def _is_first_forward(self) -> bool:
        action = self._executor.status.action
        return isinstance(action, Action) and (action.kind, action.micro_batch) == ("F", 0)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Records how far the update in this context changes the outputs of the recorded inputs."""
        stage = self._executor.stage
        # the same buffers for both: the update replaces BatchNorm's running statistics, too
        buffers = {index: copies_of_buffers(stage.by_index[index]) for index in self._inputs}
        before = {index: stage.evaluate_layer(index, inputs, buffers[index]) for index, inputs in self._inputs.items()}
        yield
        for index, inputs in self._inputs.items():
            change = stage.evaluate_layer(index, inputs, buffers[index]) - before[index]
            self._stats[index] = *self._stats[index], _rms(change)

    def write(self, step: int, norms: tuple[float, ...]) -> None:
        """Gathers and writes the record of a step; ``norms`` are the gradient norms of all layers."""
        if not self.due(step):
            return
        per_worker = all_gather([(index, [float(value) for value in values]) for index, values in self._stats.items()])
        self._inputs.clear()
        self._stats.clear()
        if self._lines is None:
            return
        per_layer = {index: values for pairs in per_worker for index, values in pairs}
        none: list[float | None] = [None] * len(_NAMES)
        columns = zip(*(per_layer.get(index, none) for index in range(len(norms))), strict=True)
        self._lines.write(
            {
                "step": step + 1,
                "norms": [_finite(norm) for norm in norms],
                **{name: [_finite(value) for value in column] for name, column in zip(_NAMES, columns, strict=True)},
            }
        )


def _rms(tensor: Tensor) -> Tensor:
    """Returns the root mean square of all values, a scalar on the tensor's device."""
    return tensor.detach().float().square().mean().sqrt()


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
