"""Bytes of any cell of consecutive layers, from the costs of its layers; its peak also in closed form.

``suite.pipeline.planning.stage_memory`` has the peak over a stage's actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from suite.pipeline.model.topology import CellPair
from suite.pipeline.planning.costs import LayerCost, SkipCost, duplicate_gradient_bytes, skip_costs
from suite.pipeline.planning.stage_memory import CellMemory, InFlightPeaks, Ints, running_sum
from suite.settings import OptimizerSettings

UNCOUNTED_BYTES = 1 << 20
"""Bytes not counted individually: metadata, targets, losses, the allocator's rounding."""

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
    """Bytes of any cell of consecutive layers, as a stage of a pipeline."""

    def __init__(
        self,
        costs: Sequence[LayerCost],
        in_flight: InFlightPeaks,
        bytes_per_parameter: float,
        process_bytes: int = 0,
        gradient_bytes: int = 0,
    ) -> None:
        """Each trained value takes ``bytes_per_parameter``, of which ``gradient_bytes`` are its gradient's, and each
        frozen one ``FROZEN_BYTES``; ``process_bytes`` is the memory of a worker without a model. Gradients count from
        the start of a step where ``gradient_bytes`` is 0."""
        self._gradient_bytes = gradient_bytes
        self.in_flight, self._micro_batches = in_flight, in_flight.micro_batches
        self._per_parameter, self._process = bytes_per_parameter, process_bytes
        self._layers = len(costs)

        def column(name: str) -> Ints:
            return np.array([getattr(cost, name) for cost in costs], dtype=np.int64)

        self._inputs = np.append(column("boundary_bytes"), 0)  # at L: the last layer sends nothing
        self._gradients = np.append(column("gradient_bytes"), 0)
        frozen = column("frozen")
        self._trained = running_sum(column("parameters") - frozen)
        self._frozen = running_sum(frozen)
        self._alive = running_sum(column("activation_bytes"))
        held = column("state_bytes") + column("cast_bytes") + self._micro_batches * column("recorded_bytes")
        self._held = running_sum(held)
        self._deferred = running_sum(column("deferred_bytes"))
        output_gradients = self._gradients[1:]
        self._first_peak = column("forward_peak_bytes")
        self._later_peak = _RangeMaximum(np.append(self._first_peak + self._inputs[:-1], 0))
        self._graph_peak = _RangeMaximum(self._alive[:-1] + column("graph_peak_bytes"))
        self._last_backward_peak = self._alive[1:] + column("backward_peak_bytes")
        self._backward_peak = _RangeMaximum(self._last_backward_peak + output_gradients)
        # a step's first backward allocates gradients from the last layer to the first: earlier layers' do not exist yet
        self._last_first_peak = self._last_backward_peak - gradient_bytes * self._trained[:-1]
        self._first_backward_peak = _RangeMaximum(self._last_first_peak + output_gradients)
        self._update_peak = _RangeMaximum(column("update_peak_bytes"))
        self._skip_costs = skip_costs(costs)
        self._output_peak = _RangeMaximum(self._inputs[1:])
        duplicates = self._summed(duplicate_gradient_bytes)[1:]
        self._duplicates = _RangeMaximum(duplicates)
        self._grad_peak = _RangeMaximum(output_gradients + duplicates)
        self._far = _RangeMaximum(self._summed(self._max_far_activations)[1:])
        self._far_back = self._summed(self._max_far_gradients)

    def without_waiting(self) -> MemoryModel:
        """Returns the model of a schedule in which nothing waits between two cells of a stage."""
        model = copy(self)
        model.in_flight = replace(self.in_flight, waiting=dict.fromkeys(self.in_flight.waiting, (0, 0)))
        return model

    def in_partition(self, cells: Sequence[range], k: int) -> CellMemory:
        """Returns the bytes of one of these cells. A skip to another cell of the same stage needs no message."""
        begin, end = cells[k][0], cells[k][-1] + 1
        next_end = cells[k + 1][-1] + 1 if k + 1 < len(cells) else end
        before, after = self._skip_costs[begin], self._skip_costs[end]
        bypassing_in = [skip for skip in before if skip.target >= end and skip.own_tensor_at(begin)]
        bypassing_out = [skip for skip in after if skip.source < begin]
        duplicates = sum(
            skip.gradient_bytes for skip in after if not skip.own_tensor_at(end) and skip.target >= next_end
        )
        kept, kept_gradients = self._kept_for_neighbours(k, begin, end)
        parts = self._parts(begin, end, self._inputs[end], self._gradients[end])
        cell_memory = CellMemory(*map(int, parts))
        stashed, popped = self._local_skips(cells, k)
        return replace(
            cell_memory,
            input_bytes=cell_memory.input_bytes - sum(skip.bytes for skip in bypassing_in),
            sent_gradient_bytes=max(
                0,
                cell_memory.sent_gradient_bytes
                - kept_gradients
                - sum(skip.gradient_bytes for skip in (*bypassing_in, *popped)),
            ),
            sent_activation_bytes=cell_memory.sent_activation_bytes
            - kept
            - sum(skip.bytes for skip in (*bypassing_out, *stashed) if skip.own_tensor_at(end)),
            received_gradient_bytes=cell_memory.received_gradient_bytes
            - sum(skip.gradient_bytes for skip in bypassing_out)
            + duplicates,
            backward_peak_bytes=cell_memory.backward_peak_bytes + duplicates,  # a third tensor holds the sum
            far_message_bytes=self._far_message_bytes(cells, k)
            + self._waiting((k, k + 1), 0) * kept
            + self._waiting((k - 1, k), 1) * kept_gradients,
            gradient_bytes=self._gradient_bytes * int(self._trained[end] - self._trained[begin]),
            made_gradient_bytes=self._made_gradient_bytes(begin, end),
        )

    def _kept_for_neighbours(self, k: int, begin: int, end: int) -> tuple[int, int]:
        """Returns the bytes of outputs for the next cell, and of gradients for the previous one, that stay on the stage
        because it also has that cell; skips have their own rule (``_local_skips``)."""
        waiting, kept, kept_gradients = self.in_flight.waiting, 0, 0
        if (k, k + 1) in waiting:
            own = sum(skip.bytes for skip in self._skip_costs[end] if skip.own_tensor_at(end))
            kept = int(self._inputs[end]) - own
        if (k - 1, k) in waiting:
            own = sum(skip.gradient_bytes for skip in self._skip_costs[begin] if skip.own_tensor_at(begin))
            kept_gradients = int(self._gradients[begin]) - own
        return kept, kept_gradients

    def _waiting(self, pair: CellPair, direction: int) -> int:
        """Returns how many activations (0) or gradients (1) wait at most between two cells of one stage, beyond those
        that count as received ahead."""
        most = self.in_flight.waiting.get(pair, (0, 0))[direction]
        return max(0, most - self.in_flight.flow.recvs_ahead(-1 if direction else 1))

    def _made_gradient_bytes(self, begin: int, end: int) -> int:
        """Returns what the gradients that a first backward makes, from the last layer to the first, add to its peak."""

        def peak(last: Ints, before: _RangeMaximum) -> int:
            largest = int(last[end - 1])
            return max(largest, int(before(begin, end - 1))) if end - begin > 1 else largest

        first = peak(self._last_first_peak, self._first_backward_peak) + self._gradient_bytes * int(self._trained[end])
        return first - peak(self._last_backward_peak, self._backward_peak)

    def _local_skips(self, cells: Sequence[range], k: int) -> tuple[list[SkipCost], list[SkipCost]]:
        """Returns the skips that a cell stashes for another cell of its stage, and those that it pops from one."""
        placement = self.in_flight.placement
        if not self.in_flight.waiting:
            return [], []
        of_stage = {layer for cell in placement.on_stage(placement.stage_of(k), cells) for layer in cell}
        of_stage = of_stage.difference(cells[k])
        stashed = [
            skip for skip in self._skip_costs[cells[k][-1] + 1] if skip.source in cells[k] and skip.target in of_stage
        ]
        popped = [skip for skip in self._skip_costs[cells[k][0]] if skip.target in cells[k] and skip.source in of_stage]
        return stashed, popped

    def _far_message_bytes(self, cells: Sequence[range], k: int) -> int:
        """Returns the bytes in flight to cells beyond the neighbours that ``peak_bytes`` does not count already.

        A skip sent to a cell beyond the neighbours stays allocated until the step ends, or until later sends to that
        cell push it out. What is sent to a neighbour is replaced by gradients that follow; the first cell sends none. A
        skip to another cell of the same stage waits there.
        """
        cell_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
        stashed, popped = self._local_skips(cells, k)
        flow = self.in_flight.flow
        forward = sum(self._waiting((k, cell_of[skip.target]), 0) * skip.bytes for skip in stashed)
        back = sum(self._waiting((cell_of[skip.source], k), 1) * skip.gradient_bytes for skip in popped)
        for skip in self._skip_costs[cells[k][-1] + 1]:
            distance = cell_of[skip.target] - k
            if skip.source in cells[k] and distance > 1 and skip not in stashed:
                already_counted = flow.max_inflight_sends if k == 0 else 0
                forward += self._far_sends(distance, already_counted) * skip.bytes
        for skip in self._skip_costs[cells[k][0]]:
            distance = k - cell_of[skip.source]
            if skip.target in cells[k] and distance > 1 and skip not in popped:
                back += self._far_sends(distance, flow.max_inflight_sends) * skip.gradient_bytes
        return forward + back

    def _far_sends(self, distance: int, already_counted: int) -> int:
        """Returns the most messages in flight over a distance in cells, minus those ``already_counted``."""
        in_flight = min(self._micro_batches, self.in_flight.flow.max_sends_to(distance))
        return in_flight - min(self._micro_batches, already_counted)

    def _max_far_activations(self, cut: int, skip: SkipCost) -> int:
        """The most bytes of a skip in flight behind a cut, if each layer after it were a stage."""
        return self._far_sends(skip.target - cut + 1, already_counted=0) * skip.bytes if skip.target > cut else 0

    def _max_far_gradients(self, cut: int, skip: SkipCost) -> int:
        """The same for its gradients before a cut; gradients within a stage do not count as sent."""
        flow = self.in_flight.flow
        already_counted = flow.recvs_ahead(-1) if self.in_flight.waiting else flow.max_inflight_sends
        return self._far_sends(cut - skip.source, already_counted) * skip.gradient_bytes if skip.source < cut - 1 else 0

    def _summed(self, of: Callable[[int, SkipCost], int]) -> Ints:
        sums = [sum(of(cut, skip) for skip in skip_cost) for cut, skip_cost in enumerate(self._skip_costs)]
        return np.array(sums, dtype=np.int64)

    def furthest_end(self, limit: int) -> list[int]:
        """Returns for each layer the end, exclusive, of the longest cell that begins there and fits ``limit`` bytes.

        Messages count with the largest boundary inside the cell, so that every shorter cell fits too.
        """
        begin, end = np.arange(self._layers), np.arange(self._layers)
        step = 1 << self._layers.bit_length()
        while step:
            longer = end + step
            inside = longer <= self._layers
            fits = np.zeros(self._layers, dtype=bool)
            fits[inside] = self.peak_upper_bound(begin[inside], longer[inside]) <= limit
            end = np.where(fits, longer, end)
            step //= 2
        return [int(at) for at in end]

    def peak_upper_bound(self, begin: Ints | int, end: Ints | int) -> Ints:
        """Returns the peak in closed form, of a cell or of many at once; never below ``peak_bytes``, because
        ``furthest_end`` compares it with the limit."""
        fixed, inputs, activations, forward, graph, backward, update, sent, received, sent_back, deferred = self._parts(
            begin, end, self._output_peak(begin, end), self._grad_peak(begin, end)
        )
        in_flight, graphs = self.in_flight, max(1, self.in_flight.graphs)
        flow = in_flight.flow
        neighbours = [pair for pair in in_flight.waiting if pair[1] == pair[0] + 1]
        waiting = max((self._waiting(pair, direction) for pair in neighbours for direction in (0, 1)), default=0)
        most = max((max(in_flight.waiting[pair]) for pair in neighbours), default=0)
        sends = min(max(flow.max_inflight_sends, most), self._micro_batches)
        # each replaces the inputs that its B frees
        returned = min(flow.max_inflight_sends, self._micro_batches - 1)
        filling = (graphs - 1) * activations + np.maximum(forward, graph)
        if not in_flight.fill_then_drain:  # a forward without graph may run while the most graphs are alive
            filling = np.maximum(filling, graphs * activations + forward)
        backward = backward + self._duplicates(begin, end)
        draining = np.maximum((graphs - 1) * activations + graph, graphs * activations + backward)
        gradients = min(flow.recvs_ahead(-1) + 1, self._micro_batches)
        messages = gradients * received + self._far(begin, end) + self._far_back[begin]
        # what waits for a cell of the same stage does so beside what is sent to another stage
        if in_flight.fill_then_drain:
            messages = messages + sends * sent + returned * np.maximum(0, sent_back - inputs) + waiting * sent_back
        else:
            larger, smaller = np.maximum(sent, sent_back), np.minimum(sent, sent_back)
            others = max(min(flow.max_inflight_sends - sends, self._micro_batches), waiting)
            messages = messages + sends * larger + others * smaller
        if in_flight.deferred:
            messages = messages + in_flight.deferred * deferred + np.maximum(0, deferred - activations)
        kept = min(self._micro_batches, in_flight.inputs + flow.recvs_ahead(1))
        standing = kept * inputs + np.maximum(filling, draining) + messages
        peak: Ints = fixed + np.maximum(standing, update)
        return peak

    def _parts(self, begin: Ints | int, end: Ints | int, sent: Ints, received: Ints) -> tuple[Ints, ...]:
        """The fields of ``CellMemory``, in their order."""
        weights = self._per_parameter * (self._trained[end] - self._trained[begin])
        weights = weights + FROZEN_BYTES * (self._frozen[end] - self._frozen[begin])
        inputs, sent_back = self._inputs[begin], np.where(begin == 0, 0, self._gradients[begin])
        # the first layer's inputs are counted as saved inputs, a later layer's are additional
        later = np.where(end - begin > 1, self._later_peak(begin + 1, np.maximum(end, begin + 2)), 0)
        forward = np.maximum(self._first_peak[begin], later)
        # the gradient that the last layer gets is a message and counted as one, that of an earlier layer is not
        before = np.where(end - begin > 1, self._backward_peak(begin, np.maximum(end - 1, begin + 1)), 0)
        backward = np.maximum(before, self._last_backward_peak[end - 1])
        return (
            np.ceil(weights).astype(np.int64) + self._held[end] - self._held[begin] + self._process + UNCOUNTED_BYTES,
            inputs,
            self._alive[end] - self._alive[begin],
            forward,
            self._graph_peak(begin, end) - self._alive[begin],
            backward - self._alive[end],
            self._update_peak(begin, end),
            sent,
            received,
            sent_back,
            self._deferred[end] - self._deferred[begin],
        )


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
        result: Ints = np.maximum(self._stacked[level, begin], self._stacked[level, end - (1 << level)])
        return result
