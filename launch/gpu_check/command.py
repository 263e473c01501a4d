"""``make gpu-check``: the first hour on a new machine. Are GPUs correct, do a step's time and memory match the plan?

``python -m launch.gpu_check`` runs from a checkout with torch, numpy and pydantic alone, without the parts that take
DeepSpeed. It needs no data. Results are in ``runs/gpu-check``; a further call runs the parts that are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.errors import DeviceError, PlacementError, SettingError, SuiteError
from suite.log import Log
from suite.paths import write_atomically

if TYPE_CHECKING:
    from experiments.base.cluster import Cluster
    from experiments.report.table import Table
    from launch.gpu_check.work import Sizes

FOLDER = Path("runs") / "gpu-check"
MINUTES = 25.0
NEEDED = ("torch", "numpy", "pydantic")


def check(
    log: Log, show: Callable[[Table], None], command: str, kind: str, minutes: float, folder: Path = FOLDER
) -> None:
    """Checks this machine's GPUs, or the CPU, with the parts that no earlier call finished. Prints and writes results.

    Raises SettingError or PlacementError if it cannot start. After writing it raises DeviceError if a device computes
    wrong numbers, and PlacementError if a peak is above its plan or a part failed.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise SettingError(f"gpu-check needs {', '.join(NEEDED)}; this Python lacks {' and '.join(absent)}; install it")
    if not (math.isfinite(minutes) and minutes > 0):
        raise SettingError(f"--minutes is {minutes:g}; gpu-check needs more than 0, {MINUTES:g} if you leave it out")
    from launch.gpu_check.parts import run_parts, table
    from launch.gpu_check.work import PAPER, SMALL

    machine, sizes = find_machine(kind), PAPER if kind == "cuda" else SMALL
    folder.mkdir(parents=True, exist_ok=True)
    path, same = folder / f"{kind}.json", identity(sizes, machine)
    earlier = _earlier(path, same)
    for parts in run_parts(sizes, machine, minutes, earlier, log):
        write_atomically(path, json.dumps(same | {"parts": earlier | parts}, indent=1, allow_nan=False) + "\n")
    found = table(parts, f"`{command}` on {machine.name}, torch {same['torch']}, code {same['code']}")
    path.with_suffix(".md").write_text(found.markdown())
    show(found)
    log(f"written: {path}, {path.with_suffix('.md').name}")
    _raise_faults(parts, path)


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


def identity(sizes: Sizes, machine: Cluster) -> dict[str, Any]:
    """Returns what must be equal for a result to be taken from an earlier call: settings, devices, versions."""
    import torch

    from launch.diagnostics.node_facts import code_digest, list_gpus

    return {
        "sizes": repr(sizes),
        "machine": repr(machine),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code": code_digest(),
        "drivers": [gpu.driver for gpu in list_gpus()[0]],
    }


def _raise_faults(parts: dict[str, Any], path: Path) -> None:
    """Raises the most severe kind of fault: wrong numbers, then memory above the plan, then parts that failed."""
    faults = [fault for part in parts.values() for fault in part.get("faults", [])]
    if faults:
        raise DeviceError(
            f"{'; '.join(faults)}; do not train on this device until another driver or torch version fixes it; "
            f"{path} has all numbers"
        )
    over_plan = [part["over_plan"] for part in parts.values() if part.get("over_plan")]
    if over_plan:
        raise PlacementError(
            f"{'; '.join(over_plan)}; plans for this device are too small: leave that much more free by "
            f"pipeline.memory_reserve; {path} has all numbers"
        )
    failed = [f"{name} failed: {part['reason']}" for name, part in parts.items() if part["status"] == "failed"]
    if failed:
        raise PlacementError(f"{'; '.join(failed)}; the next call runs it again, the finished parts not")


def _earlier(path: Path, same: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of an earlier call with the same settings, device and versions; none for a torn file."""
    try:
        results = json.loads(path.read_text())
        return dict(results["parts"]) if all(results[key] == value for key, value in same.items()) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def main() -> None:
    parser = argparse.ArgumentParser("python -m launch.gpu_check", description="Check the GPUs, or --device cpu.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="a part starts only if it fits what is left")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    options = parser.parse_args()
    log = partial(print, flush=True)
    try:
        check(log, lambda table: log(table.markdown()), "python -m launch.gpu_check", options.device, options.minutes)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
