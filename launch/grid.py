"""Where each stage stands in the step's schedule, as text: what a stall looks like.

stage 0   F0 F1 F2 F3 [B3] R2 B2 ...   waits for the gradients from stage 1 of micro-batch 3
stage 1   F0 F1 [F2] F3 B3 R2 ...      the first cause: no sign of life for 8 s
stage 2   F0 F1 [F2] F3 B3 ...         waits for the activations from stage 1 of micro-batch 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.beats import Beat
from suite.pipeline.recipe import Recipe
from suite.pipeline.topology import Place

BEFORE, AFTER = 6, 4
"""Actions of a row that are shown on either side of the present one."""


def grid(
    recipe: Recipe, places: Sequence[Place], micro_batches: int, beats: Mapping[int, Beat], said: Mapping[int, str]
) -> str:
    """Returns a row a worker, those of one replica together. ``beats`` are by rank; ``said`` is what stands behind a
    row in place of what its worker said itself."""
    rows = []
    for place in places:
        actions = [str(action) for action in recipe.actions(place.stages, micro_batches)[place.stage]]
        name = f"stage {place.stage}" if place.replicas == 1 else str(place)
        row, own = _row(actions, beats.get(place.rank))
        rows.append((name, row, said.get(place.rank, own)))
    names, shown = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"  {name:<{names}}  {row:<{shown}}  {end}".rstrip() for name, row, end in rows)


def _row(actions: Sequence[str], beat: Beat | None) -> tuple[str, str]:
    if beat is None:
        return "[start]", "was never heard"
    row = ["batch", "open", *actions, "close", "update", "save"]
    if beat.what not in row:
        return f"[{beat.what}]", _said(beat)
    at = row.index(beat.what)
    marked = [f"[{one}]" if place == at else one for place, one in enumerate(row)]
    begin, end = max(0, at - BEFORE), at + AFTER + 1
    cut = [*(["..."] if begin else []), *marked[begin:end], *(["..."] if end < len(row) else [])]
    return " ".join(cut), _said(beat)


def _said(beat: Beat) -> str:
    step = f"step {beat.step}, " if beat.step is not None else ""
    layer = f"in layer {beat.layer}, " if beat.layer is not None else ""
    return f"{step}{layer}{f'waits for {beat.waiting}' if beat.waiting else 'computes'}, {beat.since_s:.0f} s"
