"""``record.json``: the results of a finished run, for reports and for the summary at its end."""

from __future__ import annotations

import json
import math
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
from suite.training.jsonl import read_lines
from suite.training.loop import Progress


@dataclass(frozen=True)
class RunResult:
    """What the workers know at the end of a run."""

    progress: Progress
    score: float | None
    """The model's on held-out data; None without such data."""
    baselines: dict[str, float]
    """Scores without the model, by name, the one to beat first."""
    bytes_per_unit: float | None
    """Bytes of text of a held-out token; None for anything but a language model."""
    memory: list[int]
    """Peak bytes of each worker."""
    wandb_run: str | None
    counts: dict[str, int]
    """Of the data."""


def write_record(run: RunFolder, experiment: Experiment, layers: list[nn.Module], result: RunResult) -> dict[str, Any]:
    """Writes the record atomically and returns it. Seconds count only steps, over all attempts; losses are in nats per
    token or image."""
    lines = read_lines(run.metrics)
    seconds = sum(line["seconds"] for line in lines)
    pipeline, units = experiment.pipeline, result.progress.units
    record = {
        "name": experiment.name, "scale": experiment.scale, "data": experiment.data,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "counts": result.counts, "steps": result.progress.step, "unit": experiment.unit,
        "measure": experiment.metric_name, experiment.unit: units, "seconds": seconds,
        f"{experiment.unit}_per_second": units / seconds,
        "loss_first": lines[0]["loss"], "loss_last": lines[-1]["loss"],
        **_scores(experiment.metric_name, result),
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(result.memory),
        "shrunk": list(experiment.shrunk), "wandb_run": result.wandb_run,
    }  # fmt: skip
    write_atomically(run.record, json.dumps(record, indent=1) + "\n")
    return record


def _scores(measure: str, result: RunResult) -> dict[str, Any]:
    """Returns the scores on held-out data; of a language model also perplexity and bits per byte, which does not depend
    on the tokenizer: nats per token / ln 2 / bytes per token."""
    scores: dict[str, Any] = {}
    if result.score is not None:
        scores[f"valid_{measure}"] = result.score
    if result.baselines:
        scores |= {f"baseline_{measure}": next(iter(result.baselines.values())), "baselines": result.baselines}
    if result.score is not None and result.bytes_per_unit is not None:
        scores |= {
            "valid_perplexity": math.exp(result.score),
            "valid_bits_per_byte": result.score / math.log(2) / result.bytes_per_unit,
            "bytes_per_token": result.bytes_per_unit,
        }
    return scores


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
