"""Shows as text where each stage is in the step's schedule during a stall.

stage 0   F0 F1 F2 F3 [B3] R2 B2 ...   waits for the gradients from stage 1 of micro-batch 3
stage 1   F0 F1 [F2] F3 B3 R2 ...      the root cause: no heartbeat for 8 s
stage 2   F0 F1 [F2] F3 B3 ...         waits for the activations from stage 1 of micro-batch 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.worker.heartbeat import ENDED, Heartbeat
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig

BEFORE, AFTER = 6, 4
"""Number of actions shown before and after the current one."""


def stall_report(
    schedule_config: ScheduleConfig,
    coords: Sequence[RankCoord],
    micro_batches: int,
    heartbeats: Mapping[int, Heartbeat],
    remarks: Mapping[int, str],
) -> str:
    """Returns one row per worker, grouped by replica. ``heartbeats`` are by rank; ``remarks`` replace a worker's own
    state at the end of its row."""
    rows = []
    for coord in coords:
        actions = [str(action) for action in schedule_config.actions(coord.stages, micro_batches)[coord.stage]]
        name = f"stage {coord.stage}" if coord.replicas == 1 else str(coord)
        row, state = _row(actions, heartbeats.get(coord.rank))
        rows.append((name, row, remarks.get(coord.rank, state)))
    name_width, row_width = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"  {name:<{name_width}}  {row:<{row_width}}  {end}".rstrip() for name, row, end in rows)


def _row(actions: Sequence[str], heartbeat: Heartbeat | None) -> tuple[str, str]:
    if heartbeat is None:
        return "[start]", "no heartbeat yet"
    row = ["batch", "open", *actions, "close", "update", "save"]
    if heartbeat.action not in row:
        return f"[{heartbeat.action}]", _describe(heartbeat)
    current = row.index(heartbeat.action)
    row[current] = f"[{heartbeat.action}]"
    begin, end = max(0, current - BEFORE), current + AFTER + 1
    shown = [*(["..."] if begin else []), *row[begin:end], *(["..."] if end < len(row) else [])]
    return " ".join(shown), _describe(heartbeat)


def _describe(heartbeat: Heartbeat) -> str:
    if heartbeat.action in ENDED:
        return ""
    step = f"step {heartbeat.step + 1}, " if heartbeat.step is not None else ""
    layer = f"in layer {heartbeat.layer}, " if heartbeat.layer is not None else ""
    activity = f"waits for {heartbeat.waiting}" if heartbeat.waiting else "computes"
    return f"{step}{layer}{activity}, {heartbeat.elapsed_s:.0f} s"
