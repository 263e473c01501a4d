"""Runs of 20 steps, with settings that leave nothing to a plan: cells, micro-batches and recomputes are given, so
measured costs change no bit.

killed     a worker, by a fault at step 7; its supervisor starts it again
resumed    the whole command, by SIGKILL after step 7; ``gpipe resume`` goes on from step 5
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tests.launch.command_line import ROOT, call, losses, only_run
from tests.record.gpipe import ENVIRONMENT, finish, kill, start
from tests.record.job import Job
from tests.record.outcome import digest_of_text, outcome, tensor_digests

COMMON = "train.steps=20 train.threads=1 tracking.wandb=disabled pipeline.remat=except_last"
TEXT = (
    "text.corpus=django text.vocabulary=2000 text.max_length=24 model.dropout=0.1 train.batch_tokens=400 "
    "train.valid_pairs=8"
)
SHORT, WHOLE = 6, 64
"""Blocks of the encoder and of the decoder of t128_6b: most runs have few, since one of all layers takes a minute."""

CSV = "0F0,0F1,2F0,2F1,,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"
"""A schedule of two stages, two cells each."""

CELLS = {"interleaved": 2, "zbv": 2, "v_half": 2, "v_min": 2, "own.csv": 2}
"""Cells a stage."""

ONE_CELL = ("fill_drain", "1f1b", "zero_bubble")
SCHEDULES = (*ONE_CELL, "interleaved", "zbv", "v_half", "v_min")

WORKER_HOOK = "GPIPE_WORKER_HOOK"
KILL = f'{ROOT}/tests/faults/injection.py:inject[[{{"fault": "kill", "stage": 1, "step": 7}}]]'


@dataclass(frozen=True)
class Run:
    """A run; ``workers`` is K x R."""

    experiment: str
    settings: str
    workers: int = 1
    launcher: str = "local"
    scale: str = "laptop"
    broken: Literal["", "killed", "resumed"] = ""


def t128(stages: int, schedule: str, replicas: int = 1, more: str = "", every: int = 20, blocks: int = SHORT) -> Run:
    """Returns a run of t128_6b at scale laptop, with cells of equal numbers of layers."""
    cells = stages * CELLS.get(schedule, 1)
    count = 2 * blocks + 3
    layers = ",".join(str(count // cells + (at < count % cells)) for at in range(cells))
    virtual = f"pipeline.virtual_stages={CELLS[schedule]}" if schedule in CELLS and schedule != "own.csv" else ""
    micro_batches = "" if schedule == "own.csv" else "pipeline.micro_batches=4"
    pipeline = f"pipeline.stages={stages} pipeline.replicas={replicas} pipeline.schedule={schedule} {virtual}"
    sizes = f"model.blocks_per_stack={blocks} pipeline.layers_per_cell={layers} {micro_batches}"
    settings = f"{COMMON} {TEXT} {pipeline} {sizes} train.checkpoint_every={every} {more}"
    return Run("t128_6b", settings, stages * replicas)


def named_runs() -> Iterator[tuple[str, Run]]:
    for stages in (1, 2, 4):
        for schedule in ONE_CELL if stages == 1 else SCHEDULES:
            yield f"t128_6b K={stages} {schedule} local", t128(stages, schedule)
        yield f"t128_6b, all layers, K={stages} 1f1b local", t128(stages, "1f1b", blocks=WHOLE)
    yield "t128_6b K=2 own.csv local", t128(2, "own.csv")
    for schedule in SCHEDULES:
        yield f"t128_6b K=2 R=2 {schedule} local", t128(2, schedule, 2)
    bf16 = "optimizer.name=adafactor optimizer.learning_rate=0.05 optimizer.precision=bf16"
    for replicas in (1, 2):
        yield f"t128_6b K=2 R={replicas} adafactor bf16 local", t128(2, "1f1b", replicas, bf16)
    for launcher in ("ray", "env"):
        for stages, schedule in ((1, "fill_drain"), (2, "zero_bubble"), (2, "zbv"), (4, "interleaved")):
            yield f"t128_6b K={stages} {schedule} {launcher}", replace(t128(stages, schedule), launcher=launcher)
        yield f"t128_6b K=2 R=2 1f1b {launcher}", replace(t128(2, "1f1b", 2), launcher=launcher)
    for launcher in ("local", "ray"):
        for broken in ("killed", "resumed"):
            run = replace(t128(2, "1f1b", every=5), launcher=launcher, broken=broken)
            yield f"t128_6b K=2 1f1b {launcher}, {broken}", run
    yield from other_models()


def other_models() -> Iterator[tuple[str, Run]]:
    images = f"{COMMON} train.batch_images=32 train.test_images=64 pipeline.micro_batches=4"
    text = "text.corpus=django text.vocabulary=500 text.length=32 train.batch_sequences=8 train.valid_sequences=8"
    for stages, replicas, cells in ((1, 1, "7"), (2, 1, "4,3"), (2, 2, "4,3")):
        shape = f"pipeline.stages={stages} pipeline.replicas={replicas} pipeline.layers_per_cell={cells}"
        yield f"amoebanet_fashion K={stages} R={replicas} local", Run("amoebanet_fashion", f"{images} {shape}")
    for stages, schedule, cells in ((1, "1f1b", "15"), (2, "1f1b", "8,7"), (2, "zero_bubble", "8,7")):
        shape = f"pipeline.stages={stages} pipeline.schedule={schedule} pipeline.layers_per_cell={cells}"
        run = Run("transformer_13", f"{COMMON} {text} {shape} pipeline.micro_batches=4")
        yield f"transformer_13 K={stages} {schedule} local", run


def run_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for at, (name, run) in enumerate(named_runs()):
        yield Job(name, trained, (run, work / f"run-{at}", work / "cache"))


def trained(run: Run, folder: Path, cache: Path) -> dict[str, Any]:
    """Trains a run in a folder and returns its outcome; removes the folder."""
    folder.mkdir(parents=True)
    cache.mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(cache)
    (folder / "own.csv").write_text(CSV)
    result = outcome(train(run, folder))
    shutil.rmtree(folder)
    return {"result": result}


def train(run: Run, folder: Path) -> Path:
    """Trains a run to its end, and returns its folder."""
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.workers))
    prefix = ranks if run.launcher == "env" else ()
    variables = {WORKER_HOOK: KILL} if run.broken == "killed" else {}
    scale = ("--scale", run.scale) if ".py:" not in run.experiment else ()
    arguments = ("experiment", run.experiment, *scale, "--set", run.settings, "--launcher", run.launcher)
    if run.launcher == "local" and not run.broken:
        code, _, errors = call(*arguments, folder=folder)  # its forkserver serves the next run, too
        if code:
            raise RuntimeError(f"exit code {code}: {errors}")
    else:
        process = start(folder, *arguments, prefix=prefix, **variables)
        if run.broken == "resumed":
            try:
                process.until(
                    lambda: any(len(losses(file.parent)) > 6 for file in folder.glob("runs/*/*/metrics.jsonl")), 300
                )
            finally:
                kill(process)
            process = start(folder, "resume", only_run(folder).name, "--launcher", run.launcher)
        finish(process)
    return only_run(folder)


EXAMPLES = ("digits.py:digits", "vision_transformer.py:fashion", "language_model.py:text", "finetune_llama.py:llama")
PAGE = "One word has one meaning. A model is a list of layers. " * 400


def example_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for name in EXAMPLES:
        for stages in (1, 2):
            folder = work / f"{name.partition('.')[0]}-{stages}"
            yield Job(f"{name} K={stages}", example, (name, stages, folder, work / "cache"))


def example(name: str, stages: int, folder: Path, cache: Path) -> dict[str, Any]:
    """Trains an example, on a text of its own where it reads one; of the Llama also exports it."""
    (folder / "docs").mkdir(parents=True)
    cache.mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(cache)
    (folder / "docs/page.md").write_text(PAGE)
    shutil.copytree(ROOT / "examples", folder / "examples")
    is_llama = "llama" in name
    if is_llama:
        making = [sys.executable, folder / "examples/finetune_llama.py"]
        subprocess.run(making, env=os.environ | ENVIRONMENT, check=True, capture_output=True)
    settings = f"{COMMON} train.batch_rows=16 train.valid_rows=64 pipeline.stages={stages} pipeline.micro_batches=4"
    run = train(Run(f"examples/{name}", settings), folder)
    result = outcome(run)
    if is_llama:
        finish(start(folder, "export", run.name))
        files = sorted((run / "export").glob("*.safetensors"))
        tensors = sorted(item for file in files for item in tensor_digests(file).items())
        result["export"] = digest_of_text(json.dumps(tensors))
    shutil.rmtree(folder)
    return {"result": result}
