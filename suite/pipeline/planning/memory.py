"""Bytes of any cell of consecutive layers, from the costs of its layers.

``suite.pipeline.planning.stage_bytes`` adds them up over a stage's actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.planning.costs import (
    LayerCost,
    MessageCost,
    SkipCost,
    duplicate_gradient_bytes,
    message_costs,
    skip_costs,
)
from suite.pipeline.planning.stage_bytes import TERMS, CellBytes, Ints, Sent
from suite.pipeline.schedule.flow_control import FlowControl
from suite.settings import OptimizerSettings

UNCOUNTED_BYTES = 1 << 20
"""Bytes of a stage that are not counted one by one: metadata, targets, losses, the allocator's rounding."""

GRADIENT_BYTES = 4
"""Bytes of a trained value's gradient, in fp32."""

FROZEN_BYTES = 4
"""Bytes of a frozen value: the weight, in fp32."""


def bytes_per_parameter(optimizer: OptimizerSettings, replicas: int) -> float:
    """Returns the bytes of a trained value: weight 4 and gradient 4, always fp32; AdamW adds two moments of 4, SGD its
    momentum.

    With replicas (ZeRO-1) each holds its share of the moments, and of a flat copy of the weights and of the reduced
    gradients. Adafactor is not sharded, and its rows and columns are counted as ``LayerCost.state_bytes``. The bf16
    copies of weights are counted as ``LayerCost.cast_bytes``.
    """
    state = 4.0 * len(optimizer.state_names)
    if not state:
        return 8.0
    return 8.0 + (state if replicas == 1 else (8.0 + state) / replicas)


class MemoryModel:
    """Bytes of any cell of consecutive layers. Methods take the first layer of a cell and its end, exclusive; or of
    many cells at once."""

    def __init__(
        self, costs: Sequence[LayerCost], micro_batches: int, bytes_per_parameter: float, gradient_bytes: int = 0
    ) -> None:
        """Each trained value takes ``bytes_per_parameter``, and each frozen one ``FROZEN_BYTES``. Of the former
        ``gradient_bytes`` do not exist before the first backward of a step."""
        self.costs, self.micro_batches, self._gradient_bytes = costs, micro_batches, gradient_bytes
        self._standing_bytes = bytes_per_parameter - gradient_bytes

        def column(name: str) -> Ints:
            return np.array([getattr(cost, name) for cost in costs], dtype=np.int64)

        self.inputs = np.append(column("boundary_bytes"), 0)  # at L: the last layer sends nothing
        self.gradients = np.append(column("gradient_bytes"), 0)
        frozen = column("frozen")
        self._trained = _running_sum(column("parameters") - frozen)
        self._frozen = _running_sum(frozen)
        self._alive = _running_sum(column("activation_bytes"))
        held = column("state_bytes") + column("cast_bytes") + micro_batches * column("recorded_bytes")
        self._held = _running_sum(held)
        self._deferred = _running_sum(column("deferred_bytes"))
        output_gradients = self.gradients[1:]
        self._first_peak = column("forward_peak_bytes")
        self._later_peak = _RangeMaximum(np.append(self._first_peak + self.inputs[:-1], 0))
        self._graph_peak = _RangeMaximum(self._alive[:-1] + column("graph_peak_bytes"))
        self._last_backward_peak = self._alive[1:] + column("backward_peak_bytes")
        self._backward_peak = _RangeMaximum(self._last_backward_peak + output_gradients)
        # a step's first backward allocates gradients from the last layer to the first: earlier layers' do not exist yet
        self._last_first_peak = self._last_backward_peak - gradient_bytes * self._trained[:-1]
        self._first_backward_peak = _RangeMaximum(self._last_first_peak + output_gradients)
        self._update_peak = _RangeMaximum(column("update_peak_bytes"))

    def in_partition(self, cells: Sequence[range], placement: CellPlacement) -> list[CellBytes]:
        """Returns the bytes of each cell of a partition. What goes to another cell of the same stage needs no
        message."""
        sent = [message_costs(self.costs, cells, k) for k in range(len(cells))]
        passing = skip_costs(self.costs)
        found = []
        for k, cell in enumerate(cells):
            arriving = {source: each for source in range(k) for each in sent[source] if each.to == k}
            next_end = cells[k + 1][-1] + 1 if k + 1 < len(cells) else len(self.costs)
            beyond_next = [skip for skip in passing[cell[-1] + 1] if skip.target >= next_end]
            duplicates = sum(duplicate_gradient_bytes(cell[-1] + 1, skip) for skip in beyond_next)
            sizes = dict(zip(SIZES, map(int, self.sizes(cell[0], cell[-1] + 1)), strict=True))
            if arriving:
                sizes["input_bytes"] = sum(each.activation_bytes for each in arriving.values())
            sizes["received_gradient_bytes"] = sum(each.gradient_bytes for each in sent[k])
            sizes["backward_peak_bytes"] += duplicates  # a third tensor holds the sum
            local = [each for each in sent[k] if not placement.crosses(k, each.to)]
            found.append(
                CellBytes(
                    **sizes,
                    local_input_bytes=sum(
                        each.activation_bytes for source, each in arriving.items() if not placement.crosses(source, k)
                    ),
                    local_gradient_bytes=sum(each.gradient_bytes for each in local),
                    sent=tuple(_sent(k, sent[k], arriving, placement)),
                )
            )
        return found

    def sizes(self, begin: Ints | int, end: Ints | int) -> tuple[Ints, ...]:
        """Returns ``SIZES``."""
        trained, frozen = (of[end] - of[begin] for of in (self._trained, self._frozen))
        standing = np.ceil(self._standing_bytes * trained).astype(np.int64) + FROZEN_BYTES * frozen
        # the first layer's inputs are counted as saved inputs, a later layer's are additional
        later = np.where(end - begin > 1, self._later_peak(begin + 1, np.maximum(end, begin + 2)), 0)
        backward = self._backward_peaks(begin, end, self._last_backward_peak, self._backward_peak)
        first = self._backward_peaks(begin, end, self._last_first_peak, self._first_backward_peak)
        activations, deferred = (of[end] - of[begin] for of in (self._alive, self._deferred))
        return (
            self.inputs[begin],
            activations,
            np.maximum(self._first_peak[begin], later),
            self._graph_peak(begin, end) - self._alive[begin],
            backward - self._alive[end],
            deferred,
            np.maximum(0, deferred - activations),
            self._gradient_bytes * trained,
            first + self._gradient_bytes * self._trained[end] - backward,
            standing + self._held[end] - self._held[begin],
            self._update_peak(begin, end),
        )

    @staticmethod
    def _backward_peaks(begin: Ints | int, end: Ints | int, last: Ints, earlier: _RangeMaximum) -> Ints:
        """The gradient that the last layer gets is a message and counted as one, that of an earlier layer is not."""
        before = earlier(begin, np.maximum(end - 1, begin + 1))
        return np.where(end - begin > 1, np.maximum(before, last[end - 1]), last[end - 1])

    def summed_over_skips(self, of: Callable[[int, SkipCost], int]) -> Ints:
        """Returns the sum over the skips that pass each cut, (layers + 1,)."""
        passing = enumerate(skip_costs(self.costs))
        return np.array([sum(of(cut, skip) for skip in skips) for cut, skips in passing], dtype=np.int64)


SIZES = (
    "input_bytes",
    "activation_bytes",
    "forward_peak_bytes",
    "graph_peak_bytes",
    "backward_peak_bytes",
    "deferred_bytes",
    "split_peak_bytes",
    "gradient_bytes",
    "made_gradient_bytes",
    "fixed_bytes",
    "update_peak_bytes",
)
"""The fields of ``CellBytes`` that do not depend on other cells."""


class CellBound:
    """A bound of the bytes of any cell, whatever cells are around it. It only grows with the end of a cell, so the
    longest cell that fits is found by bisection: messages count with the largest boundary inside the cell, and skips as
    if they went ``cells`` far."""

    def __init__(self, model: MemoryModel, terms: Ints, flow: FlowControl, cells: int) -> None:
        """``terms`` are of ``peak_terms``."""
        self._model, self._terms = model, terms
        duplicates = model.summed_over_skips(duplicate_gradient_bytes)
        sends = [min(model.micro_batches, flow.max_sends_to(distance)) for distance in range(1, cells + 1)]

        def far(cut: int, skip: SkipCost) -> int:
            return sends[min(cells, skip.target - cut + 1) - 1] * skip.bytes if skip.target > cut else 0

        def far_back(cut: int, skip: SkipCost) -> int:
            """Returns the gradients in flight beyond those that count with the neighbour's."""
            return (sends[min(cells, cut - skip.source) - 1] - sends[0]) * skip.gradient_bytes

        self._sent, self._received = _RangeMaximum(model.inputs[1:]), _RangeMaximum((model.gradients + duplicates)[1:])
        self._duplicates = _RangeMaximum(duplicates[1:])
        self._far = _RangeMaximum(model.summed_over_skips(far)[1:])
        self._far_back = model.summed_over_skips(far_back)
        self._sent_back = model.gradients.copy()
        self._sent_back[0] = 0

    def peak(self, begin: Ints, end: Ints) -> Ints:
        """Returns the bound of each of many cells, without what a stage's process takes."""
        sizes = dict(zip(SIZES, self._model.sizes(begin, end), strict=True))
        sizes["backward_peak_bytes"] = sizes["backward_peak_bytes"] + self._duplicates(begin, end)
        sizes["received_gradient_bytes"] = self._received(begin, end)
        sizes["sent_activation_bytes"] = self._sent(begin, end)
        sizes["sent_gradient_bytes"] = self._sent_back[begin]
        running = (self._terms @ np.stack([sizes[name] for name in TERMS])).max(axis=0)
        standing = sizes["fixed_bytes"] + self._far(begin, end) + self._far_back[begin]
        return standing + np.maximum(running, sizes["gradient_bytes"] + sizes["update_peak_bytes"])

    def furthest_end(self, limit_bytes: int) -> list[int]:
        """Returns for each layer the end, exclusive, of the longest cell that begins there and fits."""
        layers = len(self._model.costs)
        begin, end = np.arange(layers), np.arange(layers)
        step = 1 << layers.bit_length()
        while step:
            longer = end + step
            inside = longer <= layers
            fits = np.zeros(layers, dtype=bool)
            fits[inside] = self.peak(begin[inside], longer[inside]) <= limit_bytes
            end = np.where(fits, longer, end)
            step //= 2
        return [int(at) for at in end]


def _sent(
    k: int, later: Sequence[MessageCost], earlier: Mapping[int, MessageCost], placement: CellPlacement
) -> Iterator[Sent]:
    """Yields what a cell sends: activations to ``later`` cells, gradients for what came from ``earlier`` ones."""
    for message in later:
        if message.activation_bytes:
            yield Sent(message.to - k, message.activation_bytes, not placement.crosses(k, message.to))
    for source, message in earlier.items():
        if message.gradient_bytes:
            yield Sent(source - k, message.gradient_bytes, not placement.crosses(k, source))


def _running_sum(values: Ints) -> Ints:
    """Returns the sums before each layer, and behind the last one, (layers + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))


class _RangeMaximum:
    """The maximum of any stretch of a list, or of many stretches at once: maxima of stretches of 1, 2, 4, ..."""

    def __init__(self, values: Ints) -> None:
        self._tables = [values]
        for level in range(max(1, len(values)).bit_length() - 1):
            half = 1 << level
            table = self._tables[-1].copy()
            table[:-half] = np.maximum(table[:-half], self._tables[-1][half:])
            self._tables.append(table)
        self._stacked = np.stack(self._tables)

    def __call__(self, begin: Ints | int, end: Ints | int) -> Ints:
        """Returns max(values[begin:end]), for each pair if there are many; no stretch may be empty."""
        level = np.frexp(end - begin)[1] - 1
        return np.maximum(self._stacked[level, begin], self._stacked[level, end - (1 << level)])
