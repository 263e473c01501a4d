"""The summary of a finished run: losses, scores, the best validation and utilization in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.base.figures import in_hours, in_seconds
from experiments.planning.report import PlanReport
from experiments.planning.step_parts import OUTSIDE, slower_than_planned
from launch.runs.record import perplexity
from launch.train.step_check import WARM_UPS
from suite.pipeline.schedule.timeline import Timeline
from suite.training.metrics import STEP_S
from suite.training.utilization import Peak

_CAUSES = {
    "compute": "forwards and backwards (compared with layers measured alone)",
    "recompute": "recomputed forwards (compared with layers measured alone)",
    "update": "the update",
    "bubble": "waiting of equal stages for each other",
    "imbalance": "uneven stages",
    "communication": "messages, waiting for data, and other work on the machine",
    OUTSIDE: "work before and after a step's actions, such as its data and its records",
}


def describe_step(planned: PlanReport, measured: Sequence[Timeline], steps: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line: the median step beside the plan, and the part that differs most if they are not close.

    ``measured`` are the traced steps of one replica, ``steps`` the lines of ``metrics.jsonl``.
    """
    seconds = [step[STEP_S] for step in steps[WARM_UPS:]]
    if not seconds or not measured:
        return []
    step_s = statistics.median(seconds)
    change = step_s / planned.step_s - 1
    line = f"step: {in_seconds(step_s)} measured (median), {in_seconds(planned.step_s)} {planned.kind} ({change:+.0%})"
    if abs(change) > 0.1:  # a step closer to its plan needs no explanation
        differences = slower_than_planned(planned.plan.timeline, measured, step_s, planned.plan.cell_to_stage)
        part = max(differences, key=lambda name: differences[name] * change)
        line += f"; the largest difference: {_CAUSES[part]}, {differences[part]:+.3f} s"
    return [line]


def describe_losses(record: dict[str, Any]) -> str:
    """Returns the training loss of the first and of the last step; one that was skipped has none."""
    first, last = (
        "not finite" if loss is None else f"{loss:.3f}" for loss in (record["loss_first"], record["loss_last"])
    )
    return f"loss {first} -> {last}"


def describe_scores(record: dict[str, Any]) -> str:
    """Returns the model's score on held-out data, next to the baselines, as ``record.json`` has them."""
    measure = record["measure"]
    if f"baseline_{measure}" not in record:
        valid = [name for name, value in record.items() if name.startswith("valid_") and isinstance(value, float)]
        shown = ", ".join(f"{name.removeprefix('valid_')} {record[name]:.4f}" for name in valid)
        return f"held-out data: {shown}" if shown else "no held-out data to evaluate"
    if measure == "accuracy":
        return (
            f"test accuracy: {record['valid_accuracy']:.2%}; baseline, always the most frequent class: "
            f"{record['baseline_accuracy']:.2%}"
        )
    if "bytes_per_token" in record:
        return _language_model_score(record)
    gain = record["baseline_nll"] - record["valid_nll"]
    compared = (
        f"{gain:.3f} below it" if gain > 0 else f"{-gain:.3f} above it: the model learned nothing beyond frequencies"
    )
    return (
        f"validation: {record['valid_nll']:.3f} nats per token; baseline without context: "
        f"{record['baseline_nll']:.3f} (unigram entropy of the same tokens); {compared}"
    )


def _language_model_score(record: dict[str, Any]) -> str:
    """Returns a language model's score next to the n-gram models'."""

    def described(nll: float) -> str:
        bits = nll / math.log(2) / record["bytes_per_token"]
        return f"{nll:.3f} nats per token (perplexity {perplexity(nll):.1f}, {bits:.3f} bits per byte)"

    name, best = next(iter(record["baselines"].items()))
    gain = best - record["valid_nll"]
    compared = f"{gain:.3f} below the {name}" if gain > 0 else f"{-gain:.3f} above the {name}, which is better"
    lines = [f"validation: {described(record['valid_nll'])}, {compared}"]
    return "\n".join(lines + [f"  {name}: {described(nll)}" for name, nll in record["baselines"].items()])


def describe_best(record: dict[str, Any]) -> list[str]:
    if not record.get("best_step"):
        return []
    (name,) = [name for name in record if name.startswith("best_valid_")]
    kept = f"best validation: {name.removeprefix('best_valid_')} {record[name]:.4f} at step {record['best_step']}"
    return [f"{kept}, whose checkpoint is kept"]


def describe_wall_time(wall_s: dict[str, float]) -> list[str]:
    """Returns one line: where the time went; nothing where it is not recorded."""
    parts = ", ".join(f"{part} {in_hours(seconds)}" for part, seconds in wall_s.items() if seconds >= 0.05)
    return [f"wall time: {in_hours(sum(wall_s.values()))}: {parts}"] if wall_s else []


def describe_utilization(record: dict[str, Any]) -> str:
    """Returns MFU, HFU if activations were recomputed, and the peak that they are shares of; empty if unknown."""
    if "mfu" not in record:
        return ""
    shares = f"MFU {record['mfu']:.1%}" + (f", HFU {record['hfu']:.1%}" if record["hfu"] > record["mfu"] else "")
    return f"; {shares} of {Peak(record['peak_flops_per_s'], record['peak_source'])} per worker"
