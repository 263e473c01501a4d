"""The parts of the check, the most valuable first, each one resumable and within a budget of minutes."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from experiments.base.cluster import Cluster
from experiments.report.table import Table, Value
from launch.gpu_check.gradients import Record, check_gradients, check_two_stages, check_update
from launch.gpu_check.step import check_step
from launch.gpu_check.work import Sizes
from launch.gpu_check.workers import DEADLINE_S
from suite.log import Log
from suite.pipeline.runtime.communication_errors import explain


@dataclass(frozen=True)
class Part:
    """A part, with about twice the seconds that it took."""

    name: str
    title: str
    gpu_estimate_s: float
    cpu_estimate_s: float
    run: Callable[[Sizes, Cluster], Record]
    needs_deepspeed: bool = False


PARTS = (
    Part("gradients", "gradients in fp64 and fp32, and a sum in bf16", 70, 20, check_gradients),
    Part("update", "a step with its update on every GPU, as in a run", 40, 30, check_update, needs_deepspeed=True),
    Part("step", "a step's seconds and memory, compared with its plan", 120, 40, check_step, needs_deepspeed=True),
    Part("two_stages", "K = 2 by two processes", 60, 15, check_two_stages),
)


def run_parts(
    sizes: Sizes, machine: Cluster, minutes: float, earlier: dict[str, Record], log: Log
) -> Iterator[dict[str, Record]]:
    """Runs the parts; yields all records after each, so a call that is cut off loses one part. A record's ``status`` is
    done, skipped, failed or not run.

    A part that an ``earlier`` call finished without fault is not run again. A part starts only if its estimate fits
    what is left of the minutes.
    """
    begin = time.monotonic()
    records: dict[str, Record] = {}
    for part in PARTS:
        before = earlier.get(part.name, {})
        left = minutes * 60 - (time.monotonic() - begin)
        estimate_s = part.gpu_estimate_s if machine.kind == "gpu" else part.cpu_estimate_s
        if before.get("status") == "done" and not before["faults"]:
            log(f"{part.name}: finished by an earlier call")
            records[part.name] = before | {"resumed": True}
        elif estimate_s > left:
            why = f"its estimate of {estimate_s:.0f} s is more than the {max(0.0, left):.0f} s left of --minutes"
            log(f"{part.name}: not run: {why}")
            records[part.name] = before or {"status": "not run", "reason": why}  # an earlier fault stays one
        else:
            log(f"{part.name}: {part.title}, about {estimate_s:.0f} s")
            records[part.name] = _run(part, sizes, machine)
        yield records


def table(records: dict[str, Record], title: str) -> Table:
    rows: list[list[Value]] = []
    for part in PARTS:
        record = records.get(part.name, {"status": "not run"})
        why = record.get("reason") or record.get("over_plan") or "; ".join(record.get("faults", []))
        status = "done earlier" if record.get("resumed") else record["status"]
        for what, measured, compared in record.get("rows") or [[part.title, None, None]]:
            rows.append([part.name, what, status, measured, compared, why])
    headings = ("part", "what", "status", "measured", "allowed or planned", "reason")
    notes = [
        "Gradients: the deviation relative to the largest entry on the CPU, and 5 sqrt(P n) u.",
        "A step: planned from layer costs measured on this device.",
    ]
    return Table("gpu-check", title, headings, rows, notes)


def reason(error: Exception) -> str:
    """Returns an error as one line: what it means for a process that communicates, or the last error in its text, which
    may be a process's traceback."""
    if (meaning := explain(error, "the other process", DEADLINE_S)) is not error:
        return str(meaning)
    named = re.findall(r"^[\w.]*Error: .*$", str(error), re.MULTILINE)
    return named[-1] if named else f"{type(error).__name__}: {error}".splitlines()[0]


def _run(part: Part, sizes: Sizes, machine: Cluster) -> Record:
    if part.needs_deepspeed and importlib.util.find_spec("deepspeed") is None:
        why = f"a run's {part.name} is DeepSpeed's, and it is not installed; make help installs it"
        return {"status": "skipped", "reason": why}
    begin = time.monotonic()
    try:
        record = {"status": "done"} | part.run(sizes, machine)
    except Exception as error:  # one part's failure, such as too little memory, must not hide the others
        record = {"status": "failed", "reason": reason(error)}
    return record | {"seconds": time.monotonic() - begin}
