"""``make gpu-check``: the first hour on a new machine. Are GPUs correct, how fast is one, does memory match the plan?

``python -m launch.gpu_check`` runs from a checkout with torch, numpy and pydantic alone. It needs no data. Results are
in ``runs/gpu-check``; a further call continues with the parts that are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.errors import NonFiniteError, PlacementError, SettingError, SuiteError
from suite.log import Log

if TYPE_CHECKING:
    import torch

    from experiments.report.table import Table
    from launch.gpu_check.work import Sizes

Show = Callable[["Table"], None]

FOLDER = Path("runs") / "gpu-check"
MINUTES = 25.0
NEEDED = ("torch", "numpy", "pydantic")


def check(log: Log, show: Show, command: str, kind: str = "cuda", minutes: float = MINUTES) -> None:
    """Checks this machine's first GPU, and an update on all; or the CPU. Prints and writes the results.

    Raises SettingError or PlacementError if it cannot start. After writing it raises NonFiniteError if gradients differ
    from the CPU's or a loss is not finite, and PlacementError if a peak is above its plan or a part failed.
    """
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise SettingError(f"gpu-check needs {', '.join(NEEDED)}; this Python lacks {' and '.join(absent)}; install it")
    if not (math.isfinite(minutes) and minutes > 0):
        raise SettingError(f"--minutes is {minutes:g}; gpu-check needs more than 0, {MINUTES:g} if you leave it out")
    from launch.gpu_check.device import find_device
    from launch.gpu_check.work import cpu_sizes, paper_sizes

    device = find_device(kind)
    examine(device, paper_sizes() if kind == "cuda" else cpu_sizes(), minutes, FOLDER, log, show, command)


def examine(
    device: torch.device, sizes: Sizes, minutes: float, folder: Path, log: Log, show: Show, command: str
) -> None:
    """Runs the parts that no earlier call in ``folder`` finished; writes ``<device>.json`` and ``.md``."""
    from launch.gpu_check.device import identity, require_memory
    from launch.gpu_check.parts import run_parts
    from launch.gpu_check.report import page, tables

    require_memory(sizes, device)
    path = folder / f"{device.type}.json"
    same = _jsonable(identity(sizes, device))

    def save(parts: dict[str, Any]) -> dict[str, Any]:
        results: dict[str, Any] = same | {"command": command, "parts": _jsonable(parts)}
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        partial.replace(path)
        return results

    earlier = _earlier(path, same)
    results = save(run_parts(sizes, device, minutes, earlier, log, lambda parts: save(earlier | parts)))
    path.with_suffix(".md").write_text(page(results))
    for table in tables(results):
        show(table)
    log(f"written: {path}, {path.with_suffix('.md').name}")
    _raise_faults(results["parts"], path)


def _raise_faults(parts: dict[str, Any], path: Path) -> None:
    """Raises the most severe kind of fault: wrong numbers, then memory above the plan, then parts that failed."""
    faults = [fault for part in parts.values() for fault in part.get("faults", [])]
    if faults:
        raise NonFiniteError(
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


def _jsonable(value: Any) -> Any:
    """Returns the value as JSON has it; non-finite numbers, which JSON lacks, become strings."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Runs the check from the command line, with rich if it is installed."""
    parser = argparse.ArgumentParser("python -m launch.gpu_check", description="Check one GPU, or --device cpu.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="a part starts only if it fits what is left")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    options = parser.parse_args()
    log, show = _terminal()
    try:
        check(log, show, "python -m launch.gpu_check", options.device, options.minutes)
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _terminal() -> tuple[Log, Show]:
    def log(text: str) -> None:
        print(text, flush=True)

    try:
        from rich.console import Console
    except ImportError:
        return log, lambda table: log(table.markdown())
    console = Console(markup=False, highlight=False)
    return log, lambda table: console.print(table.rich_table())
