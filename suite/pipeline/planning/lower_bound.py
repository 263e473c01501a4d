"""A lower bound of a step's time, for a schedule over cells of given costs."""

from __future__ import annotations

from collections.abc import Sequence

from suite.pipeline.planning.simulate import CellCost, action_seconds
from suite.pipeline.schedule.action import Schedule
from suite.pipeline.schedule.config import ScheduleConfig


def step_time_lower_bound_s(schedule_config: ScheduleConfig, schedule: Schedule, costs: Sequence[CellCost]) -> float:
    """Returns a lower bound in seconds for a step of a schedule over cells of these costs, without the update.

    For any schedule: before a stage's first action a forward passes all previous stages, then the stage runs all its
    actions, then a gradient passes the previous stages, unless deferred weight gradients hide that. The bound of
    fill-drain is tighter, sum (F+B) + max of the others' F+B+R: a mini-batch passes all stages once, and the slowest
    stage M times (section 2.3 of the paper). A forward that keeps its graph takes R, not F; and where the last stage
    recomputes everything, the very first B waits for its R, the only one that nothing hides.
    """
    if schedule_config.schedule == "fill_drain":
        return _fill_drain_lower_bound_s(schedule, costs)
    bound, before = 0.0, 0.0
    seconds = action_seconds(schedule, costs, schedule_config.placement(len(schedule)))
    for k, actions in enumerate(schedule):
        busy = sum(
            sum(seconds(k, action) for action in actions if action.virtual_stage == virtual_stage)
            for virtual_stage in range(schedule_config.virtual_stages)
        )
        bound = max(bound, before + busy)
        cost = costs[k]
        before += min(cost.forward_s, cost.recompute_s) + (
            0.0 if schedule_config.defers_weight_grads else cost.backward_s
        )
    return bound


def _fill_drain_lower_bound_s(schedule: Schedule, costs: Sequence[CellCost]) -> float:
    through = others = 0.0
    for actions, cost in zip(schedule, costs, strict=True):
        count, recompute_count = (sum(action.kind == kind for action in actions) for kind in "FR")
        first = (
            min(cost.forward_s, cost.recompute_s)
            if 0 < recompute_count < count
            else (cost.forward_s if recompute_count else cost.recompute_s)
        )
        through += first + cost.backward_s
        rest = recompute_count if recompute_count < count else count - 1
        both, kept = cost.recompute_s + cost.backward_s, count - 1 - rest
        others = max(others, rest * (cost.forward_s + both) + kept * both)
    count, recompute_count = (sum(action.kind == kind for action in schedule[-1]) for kind in "FR")
    return through + others + (costs[-1].recompute_s if count and recompute_count == count else 0.0)
