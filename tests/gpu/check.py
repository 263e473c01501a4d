"""``make gpu-check``: the first hour on a new machine. Are GPUs correct, do a step's time and memory match the plan?

``python -m tests.gpu`` runs from a checkout with torch, numpy, pydantic and psutil alone, without the parts that take
DeepSpeed. It needs no data. Results are in ``runs/gpu-check``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.errors import PlacementError, SettingError, SuiteError
from suite.paths import write_atomically

if TYPE_CHECKING:
    from experiments.base.cluster import Cluster
    from experiments.report.table import Table
    from tests.gpu.gradients import Record
    from tests.gpu.work import Sizes

FOLDER = Path(os.environ.get("GPIPE_STORAGE", "")) / "runs" / "gpu-check"
NEEDED = ("torch", "numpy", "pydantic", "psutil")


class DeviceError(SuiteError):
    """A device computes wrong numbers."""


@dataclass(frozen=True)
class Part:
    name: str
    title: str
    run: Callable[[Sizes, Cluster], Record]
    needs_deepspeed: bool = False


def all_parts() -> tuple[Part, ...]:
    """Returns the parts, the most valuable first."""
    from tests.gpu.gradients import check_gradients, check_two_stages, check_update
    from tests.gpu.step import check_step

    return (
        Part("gradients", "gradients in fp64 and fp32, and a sum in bf16", check_gradients),
        Part("update", "a step with its update on every GPU, as in a run", check_update, needs_deepspeed=True),
        Part("step", "a step's seconds and memory, compared with its plan", check_step, needs_deepspeed=True),
        Part("two_stages", "K = 2 by two processes", check_two_stages),
    )


def check(kind: str, folder: Path = FOLDER) -> None:
    """Checks this machine's GPUs, or the CPU. Prints and writes results after each part.

    Raises SettingError or PlacementError if it cannot start. At the end it raises DeviceError if a device computes
    wrong numbers, and PlacementError if a peak is above its plan or a part failed.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise SettingError(f"gpu-check needs {', '.join(NEEDED)}; this Python lacks {' and '.join(absent)}; install it")
    import torch

    from tests.gpu.work import PAPER, SMALL

    machine, sizes = find_machine(kind), PAPER if kind == "cuda" else SMALL
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    records: dict[str, Record] = {}
    for part in all_parts():
        print(f"{part.name}: {part.title}", flush=True)
        records[part.name] = run_part(part, sizes, machine)
        results = {"sizes": repr(sizes), "machine": repr(machine), "torch": torch.__version__, "parts": records}
        write_atomically(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
    found = table(records, f"`make gpu-check` on {machine.name}, torch {torch.__version__}")
    path.with_suffix(".md").write_text(found.markdown())
    print(found.markdown())
    print(f"written: {path}, {path.with_suffix('.md').name}")
    raise_faults(records, path)


def find_machine(kind: str) -> Cluster:
    """Returns this machine's GPUs, or its CPU. Raises PlacementError for a GPU that cannot train in bf16, or none."""
    from experiments.base.cluster import Cluster
    from launch.worker.devices import BF16_CAPABILITY, cpu_model, gpus
    from suite.cgroups import cpu_limit, memory_limit_bytes

    if kind == "cpu":
        return Cluster(cpu_limit(), memory_limit_bytes(), "cpu", name=cpu_model())
    if kind != "cuda":
        raise SettingError(f"gpu-check has no device {kind!r}: --device is cuda or cpu")
    try:
        found = gpus()
    except PlacementError as error:
        raise PlacementError(f"gpu-check needs a GPU: {error}; --device cpu checks the CPU instead") from None
    if not found.has_bf16:
        raise PlacementError(
            f"{found.name}, or another GPU here, multiplies no bf16, the precision of the paper's runs; use GPUs of "
            f"compute capability {BF16_CAPABILITY}.0 or newer, such as an A100"
        )
    return found


def run_part(part: Part, sizes: Sizes, machine: Cluster) -> Record:
    """Returns the record of a part; its ``status`` is done, skipped or failed."""
    if part.needs_deepspeed and importlib.util.find_spec("deepspeed") is None:
        why = f"a run's {part.name} is DeepSpeed's, and it is not installed: pip install deepspeed"
        return {"status": "skipped", "reason": why}
    begin = time.monotonic()
    try:
        record = {"status": "done"} | part.run(sizes, machine)
    except Exception as error:  # one part's failure, such as too little memory, must not hide the others
        record = {"status": "failed", "reason": reason(error)}
    return record | {"seconds": time.monotonic() - begin}


def reason(error: Exception) -> str:
    """Returns an error as one line: what it means for a process that communicates, or the last error in its text, which
    may be a process's traceback."""
    from suite.pipeline.runtime.communication_errors import explain
    from tests.gpu.workers import DEADLINE_S

    if (meaning := explain(error, "the other process", DEADLINE_S)) is not error:
        return str(meaning)
    named = re.findall(r"^[\w.]*Error: .*$", str(error), re.MULTILINE)
    return named[-1] if named else f"{type(error).__name__}: {error}".splitlines()[0]


def table(records: dict[str, Record], title: str) -> Table:
    from experiments.report.table import Table

    rows: list[list[Any]] = []
    for part in all_parts():
        record = records[part.name]
        why = record.get("reason") or record.get("over_plan") or "; ".join(record.get("faults", []))
        for what, measured, compared in record.get("rows") or [[part.title, None, None]]:
            rows.append([part.name, what, record["status"], measured, compared, why])
    headings = ("part", "what", "status", "measured", "allowed or planned", "reason")
    notes = [
        "Gradients: the deviation relative to the largest entry on the CPU, and 5 sqrt(P n) u.",
        "A step: planned from layer costs measured on this device.",
    ]
    return Table("gpu-check", title, headings, rows, notes)


def raise_faults(records: dict[str, Record], path: Path) -> None:
    """Raises the most severe kind of fault: wrong numbers, then memory above the plan, then parts that failed."""
    faults = [fault for record in records.values() for fault in record.get("faults", [])]
    if faults:
        raise DeviceError(
            f"{'; '.join(faults)}; do not train on this device until another driver or torch version fixes it; "
            f"{path} has all numbers"
        )
    over_plan = [record["over_plan"] for record in records.values() if record.get("over_plan")]
    if over_plan:
        raise PlacementError(
            f"{'; '.join(over_plan)}; plans for this device are too small: leave that much more free by "
            f"pipeline.memory_reserve; {path} has all numbers"
        )
    failed = [f"{name} failed: {record['reason']}" for name, record in records.items() if record["status"] == "failed"]
    if failed:
        raise PlacementError("; ".join(failed))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.gpu", description="Check the GPUs, or --device cpu.")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    try:
        check(parser.parse_args().device)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
