"""``make gpu-check``: is one GPU right, how fast is it, and what would make it faster.

Also ``python -m launch.gpu_check``, where torch, numpy and pydantic are all there is. It trains on no text and starts
no workers. What it finds lies in ``runs/gpu-check``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from suite.errors import NumbersError, PlacementError, SettingError, SuiteError

if TYPE_CHECKING:
    import torch

    from experiments.table import Table
    from launch.gpu.report import Findings
    from launch.gpu.work import Sizes

Say = Callable[[str], None]
Show = Callable[["Table"], None]

FOLDER = Path("runs") / "gpu-check"

NEEDED = ("torch", "numpy", "pydantic")


def check(say: Say, show: Show, command: str) -> None:
    """Checks this machine's first GPU; prints and writes what was found.

    Raises PlacementError where there is none, and NumbersError, when all is written, where gradients differ from the
    CPU's or a loss is not finite.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"gpu-check needs {', '.join(NEEDED)}, this Python has no {' and no '.join(missing)}; install it"
        )
    import torch

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            f"torch {torch.__version__} is built without CUDA"
        )  # fmt: skip
        raise PlacementError(
            f"gpu-check needs a CUDA device, torch sees none; {built}: run it where nvidia-smi lists a GPU"
        )
    from launch.gpu.work import paper_sizes

    torch.cuda.set_device(0)
    finish(examine(torch.device("cuda", 0), paper_sizes(), say, command), FOLDER, say, show)


def examine(device: torch.device, sizes: Sizes, say: Say, command: str) -> Findings:
    """Returns what there is to find on a device, which tests give as the CPU; ``say`` gets a line for each part."""
    from launch.gpu import gradients, steps, variants
    from launch.gpu.kernels import kernels
    from launch.gpu.lone import Lone, forget
    from launch.gpu.report import Findings, machine
    from launch.gpu.work import cell, whole
    from models.transformer import DecoderLayer, EncoderLayer

    begin = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - begin:4.0f} s  {text}")

    tell(f"{machine(device)['name']}: gradients against the CPU's")
    compared = gradients.compare_all(sizes, device)
    for one in compared:
        tell(f"{one.dtype}: {one.worst.error:.2g} at most, {one.tolerance:.2g} allowed")
    first_rate = steps.product_rate(sizes, device)
    tell(f"bf16 product: {first_rate / 1e12:.4g} TFLOP/s")
    trained = []
    for work in (whole(sizes), cell(sizes, EncoderLayer), cell(sizes, DecoderLayer)):
        tell(f"{work.name}: plan and {steps.WARM_UPS + sizes.steps + 1} steps")
        trained.append(steps.trained(work, sizes, device))
        tell(f"{trained[-1].step_s * 1e3:.4g} ms a step, {trained[-1].tokens_per_s:,.0f} tokens/s")
    of = trained[1]
    tell(f"{of.work.name}: kernels of a step")
    lone = Lone(of.work, device, sizes.optimizer)
    for step in range(steps.WARM_UPS):
        lone.train(step)
    found = kernels(lone, steps.WARM_UPS)
    del lone
    forget(device)
    timed = variants.measure(of.work, sizes, device, tell)
    forget(device)
    rates = first_rate, steps.product_rate(sizes, device)
    return Findings(command, device, sizes, rates, compared, trained, timed, found, of, time.monotonic() - begin)


def finish(found: Findings, folder: Path, say: Say, show: Show) -> None:
    """Writes gpu-check.json, gpu-check.md and gpu-check-kernels.txt, and prints the tables.

    Raises NumbersError where something is wrong with the device.
    """
    from launch.gpu.report import record
    from launch.gpu.tables import tables

    made = tables(found)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps(record(found), indent=1, allow_nan=False) + "\n")
    (folder / "gpu-check.md").write_text(
        "\n".join([f"`{found.command}`, {found.seconds:.0f} s (measured)\n", *(table.markdown() for table in made)])
    )
    (folder / "gpu-check-kernels.txt").write_text(found.kernels.table + "\n")
    for table in made:
        show(table)
    say(f"written: {folder}/gpu-check.json, gpu-check.md, gpu-check-kernels.txt")
    if found.faults:
        raise NumbersError(
            f"{'; '.join(found.faults)}; do not train on this device before another driver or torch mends it, "
            f"{folder}/gpu-check.json has every number"
        )


def main() -> None:
    """Runs the check on its own, with rich where it is there."""
    say, show = _terminal()
    try:
        check(say, show, "python -m launch.gpu_check")
    except SuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _terminal() -> tuple[Say, Show]:
    def say(text: str) -> None:
        print(text, flush=True)

    try:
        from rich.console import Console
    except ImportError:
        return say, lambda table: say(table.markdown())
    console = Console(markup=False, highlight=False)
    return say, lambda table: console.print(table.shown())


if __name__ == "__main__":
    main()
