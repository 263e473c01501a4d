"""``make gpu-check``: checks that one GPU computes correctly, how fast it is, and what would make it faster.

``python -m launch.gpu_check`` runs with torch, numpy and pydantic alone. It needs no data and starts no workers. The
results are in ``runs/gpu-check``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from suite.errors import NonFiniteError, PlacementError, SettingError, SuiteError
from suite.log import Log

if TYPE_CHECKING:
    import torch

    from experiments.report.table import Table
    from launch.gpu_check.report import Findings
    from launch.gpu_check.work import Sizes

Show = Callable[["Table"], None]

FOLDER = Path("runs") / "gpu-check"

NEEDED = ("torch", "numpy", "pydantic")


def check(log: Log, show: Show, command: str) -> None:
    """Checks this machine's first GPU; prints and writes the results.

    Raises PlacementError if there is none, and NonFiniteError, after writing, if gradients differ from the CPU's or a
    loss is not finite.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            f"gpu-check needs {', '.join(NEEDED)}; this Python lacks {' and '.join(missing)}; install it"
        )
    import torch

    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            f"torch {torch.__version__} is built without CUDA"
        )  # fmt: skip
        raise PlacementError(
            f"gpu-check needs a CUDA device, and torch sees none; {built}: run it where nvidia-smi lists a GPU"
        )
    from launch.gpu_check.work import paper_sizes

    torch.cuda.set_device(0)
    finish(examine(torch.device("cuda", 0), paper_sizes(), log, command), FOLDER, log, show)


def examine(device: torch.device, sizes: Sizes, log: Log, command: str) -> Findings:
    """Runs all checks on a device (tests use the CPU); ``log`` gets a line for each part."""
    from launch.gpu_check import gradients, steps, variants
    from launch.gpu_check.kernels import kernels
    from launch.gpu_check.report import Findings, machine
    from launch.gpu_check.single_stage import SingleStageTrainer, empty_cache
    from launch.gpu_check.work import cell_workload, full_model_workload
    from models.transformer import DecoderLayer, EncoderLayer

    begin = time.monotonic()

    def log_elapsed(text: str) -> None:
        log(f"{time.monotonic() - begin:4.0f} s  {text}")

    log_elapsed(f"{machine(device)['name']}: gradients against the CPU's")
    compared = gradients.compare_all(sizes, device)
    for comparison in compared:
        log_elapsed(
            f"{comparison.dtype}: largest deviation {comparison.worst.error:.2g}, {comparison.tolerance:.2g} allowed"
        )
    first_rate = steps.matmul_flops_per_s(sizes, device)
    log_elapsed(f"bf16 product: {first_rate / 1e12:.4g} TFLOP/s")
    trained = []
    for work in (full_model_workload(sizes), cell_workload(sizes, EncoderLayer), cell_workload(sizes, DecoderLayer)):
        log_elapsed(f"{work.name}: plan and {steps.WARM_UPS + sizes.steps + 1} steps")
        trained.append(steps.measure_training(work, sizes, device))
        log_elapsed(f"{trained[-1].step_s * 1e3:.4g} ms a step, {trained[-1].tokens_per_s:,.0f} tokens/s")
    profiled_run = trained[1]
    log_elapsed(f"{profiled_run.work.name}: kernels of a step")
    trainer = SingleStageTrainer(profiled_run.work, device, sizes.optimizer)
    for step in range(steps.WARM_UPS):
        trainer.train(step)
    found = kernels(trainer, steps.WARM_UPS)
    del trainer
    empty_cache(device)
    timed = variants.measure_variants(profiled_run.work, sizes, device, log_elapsed)
    empty_cache(device)
    rates = first_rate, steps.matmul_flops_per_s(sizes, device)
    return Findings(
        command, device, sizes, rates, compared, trained, timed, found, profiled_run, time.monotonic() - begin
    )


def finish(found: Findings, folder: Path, log: Log, show: Show) -> None:
    """Writes gpu-check.json, gpu-check.md and gpu-check-kernels.txt, and prints the tables.

    Raises NonFiniteError for a faulty device.
    """
    from launch.gpu_check.report import record
    from launch.gpu_check.tables import tables

    report_tables = tables(found)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(json.dumps(record(found), indent=1, allow_nan=False) + "\n")
    (folder / "gpu-check.md").write_text(
        "\n".join(
            [f"`{found.command}`, {found.seconds:.0f} s (measured)\n", *(table.markdown() for table in report_tables)]
        )
    )
    (folder / "gpu-check-kernels.txt").write_text(found.kernels.table + "\n")
    for table in report_tables:
        show(table)
    log(f"written: {folder}/gpu-check.json, gpu-check.md, gpu-check-kernels.txt")
    if found.faults:
        raise NonFiniteError(
            f"{'; '.join(found.faults)}; do not train on this device until another driver or torch version fixes it; "
            f"{folder}/gpu-check.json has all numbers"
        )


def main() -> None:
    """Runs the check from the command line, with rich if it is installed."""
    log, show = _terminal()
    try:
        check(log, show, "python -m launch.gpu_check")
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
