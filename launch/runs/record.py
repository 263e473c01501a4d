"""``record.json``: the results of a finished run, for reports and for the summary at its end."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.base.experiment import Experiment
from launch.runs.store import RunFolder
from suite.paths import write_atomically
from suite.pipeline.model.layers import count_parameters
from suite.training.jsonl import read_lines
from suite.training.loop import Progress


def make_record(
    run: RunFolder, experiment: Experiment, layers: list[nn.Module], progress: Progress, scores: dict[str, float],
    memory: list[int], wandb_run: str | None, counts: dict[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Returns the record. Seconds count only steps, over all attempts; losses are in nats per token or image."""
    lines = read_lines(run.metrics)
    seconds = sum(line["seconds"] for line in lines)
    pipeline = experiment.pipeline
    return {
        "name": experiment.name, "scale": experiment.scale, "data": experiment.data,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "counts": counts, "steps": progress.step, "unit": experiment.unit, "measure": experiment.measure,
        experiment.unit: progress.units, "seconds": seconds, f"{experiment.unit}_per_second": progress.units / seconds,
        "loss_first": lines[0]["loss"], "loss_last": lines[-1]["loss"], **scores,
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(memory), "shrunk": list(experiment.shrunk),
        "wandb_run": wandb_run,
    }  # fmt: skip


def write_record(run: RunFolder, record: dict[str, Any]) -> None:
    """Writes the record atomically."""
    write_atomically(run.record, json.dumps(record, indent=1) + "\n")


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
