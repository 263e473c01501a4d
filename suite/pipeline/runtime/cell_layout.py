"""The boundaries of a cell for all micro-batches of a mini-batch, found once for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.skip import CellBoundary, SkipLayout


@dataclass(frozen=True)
class CellLayout:
    """What enters and leaves a cell, by micro-batch. Micro-batches of equal shapes share their entries."""

    cuts: tuple[CutSpec, ...]
    """Before the cell."""
    inputs: Sequence[CellBoundary]
    outputs: Sequence[CellBoundary] | None
    """None in the last cell, which ends with the loss."""
    next_cuts: tuple[CutSpec, ...]
    """Behind the cell, as the next one needs them; empty in the last cell."""

    @staticmethod
    def of(
        cuts: tuple[CutSpec, ...], skips: SkipLayout, infer_output: Callable[[CutSpec], CutSpec] | None
    ) -> CellLayout:
        """Returns the layout for cuts before the cell. ``infer_output`` returns the cut behind it; the last cell has
        none."""
        distinct = dict.fromkeys(cuts)
        boundaries = {cut: skips.input_boundary(cut) for cut in distinct}
        inputs = [boundaries[cut] for cut in cuts]
        if infer_output is None:
            return CellLayout(cuts, inputs, None, ())
        behind = {cut: infer_output(cut) for cut in distinct}
        outputs = {cut: skips.output_boundary(behind[cut]) for cut in distinct}
        next_cuts = {cut: skips.next_cut(behind[cut]) for cut in distinct}
        return CellLayout(cuts, inputs, [outputs[cut] for cut in cuts], tuple(next_cuts[cut] for cut in cuts))

    def output(self, micro_batch: int) -> CellBoundary | None:
        """Returns what leaves the cell for a micro-batch; None in the last cell."""
        return None if self.outputs is None else self.outputs[micro_batch]
