"""``record.json``: the results of a finished run, for reports and for the summary at its end."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.base.experiment import Experiment
from launch.runs.store import RunFolder
from suite.paths import write_atomically
from suite.pipeline.model.layers import count_parameters
from suite.training.loop import Progress
from suite.training.metrics import LOSS, STEP_S, read_steps


@dataclass(frozen=True)
class RunResult:
    """What the workers know at the end of a run."""

    progress: Progress
    scores: dict[str, float | None]
    """The model's and the baseline's, by name; None without held-out data or a baseline."""
    memory: list[int]
    """Peak bytes of each worker."""
    wandb_run: str | None
    counts: dict[str, int]
    """Of the data."""


def write_record(run: RunFolder, experiment: Experiment, layers: list[nn.Module], result: RunResult) -> dict[str, Any]:
    """Writes the record atomically and returns it. Seconds count only steps, over all attempts; losses are in nats per
    token or image."""
    steps = read_steps(run.metrics)
    known = {name: score for name, score in result.scores.items() if score is not None}
    seconds = sum(step[STEP_S] for step in steps)
    pipeline, units = experiment.pipeline, result.progress.units
    record = {
        "name": experiment.name, "scale": experiment.scale, "data": experiment.data,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "counts": result.counts, "steps": result.progress.step, "unit": experiment.unit,
        "measure": experiment.metric_name, experiment.unit: units, "seconds": seconds,
        f"{experiment.unit}_per_second": units / seconds,
        "loss_first": steps[0][LOSS], "loss_last": steps[-1][LOSS], **known,
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(result.memory),
        "shrunk": list(experiment.shrunk), "wandb_run": result.wandb_run,
    }  # fmt: skip
    write_atomically(run.record, json.dumps(record, indent=1) + "\n")
    return record


def peak_memory(use_gpu: bool) -> list[int]:
    """Returns the peak memory of each worker in bytes: allocated memory on a GPU, otherwise resident memory.

    All workers must call it. Resident pages that processes share are counted in each.
    """
    if use_gpu:
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes)
    return peaks
