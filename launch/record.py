"""``record.json``: a whole run in one record, for reports and for the summary at its end."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from experiments.experiment import Experiment
from launch.runs import RunFolder
from suite.pipeline.layers import count_parameters
from suite.training.lines import read_lines
from suite.training.loop import Progress


def make_record(
    run: RunFolder, experiment: Experiment, layers: list[nn.Module], progress: Progress, scores: dict[str, float],
    memory: list[int], wandb_run: str | None, counts: dict[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Returns the record. Seconds are those of the steps alone, of all attempts; losses a token or image, in nats."""
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
    """Writes the record whole or not at all."""
    draft = run.record.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.rename(run.record)


def peak_memory(use_gpu: bool) -> list[int]:
    """Returns the most memory each worker ever held, in bytes: on a GPU allocated there, otherwise resident.

    All workers must call it. Resident pages that processes share are counted in each.
    """
    if use_gpu:
        mine = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return shares
