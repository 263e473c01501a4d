"""``record.json``: the results of a finished run, for reports and for the summary at its end."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from experiments.base.experiment import Experiment
from launch.runs.store import RunFolder
from suite.paths import write_atomically
from suite.pipeline.model.layers import count_parameters
from suite.training.loop import Progress
from suite.training.metrics import HFU, LOSS, MFU, STEP_S, every_step
from suite.training.utilization import Peak


@dataclass(frozen=True)
class RunResult:
    """What the workers know at the end of a run."""

    progress: Progress
    validated: dict[str, float | str | bool | None]
    """The model's score on held-out data, the best validation, and why the run stopped early, by name; None for those
    that do not exist."""
    baselines: dict[str, float]
    """Scores without the model, by name, the one to beat first."""
    bytes_per_unit: float | None
    """Bytes of text of a held-out token; None for anything but a language model."""
    memory: list[int]
    """Peak bytes of each worker (``suite.training.system_metrics.peak_bytes``)."""
    wandb_run: str | None
    counts: dict[str, int]
    """Of the data."""
    peak: Peak | None = None
    """Of a device; None if the model's operations are not known."""


def write_record(run: RunFolder, experiment: Experiment, layers: list[nn.Module], result: RunResult) -> dict[str, Any]:
    """Writes the record atomically and returns it. Seconds count only steps, over all attempts; losses are in nats per
    token or image."""
    sums = _StepSums.of(run)
    seconds = sums.seconds
    pipeline, units = experiment.pipeline, result.progress.units
    record = {
        "name": experiment.name, "scale": experiment.scale, "data": experiment.data,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "counts": result.counts, "steps": result.progress.step, "unit": experiment.unit,
        "measure": experiment.metric_name, experiment.unit: units, "seconds": seconds,
        f"{experiment.unit}_per_second": units / seconds,
        "loss_first": sums.loss_first, "loss_last": sums.loss_last,
        **_scores(experiment.metric_name, result), **_utilization(sums, result.peak),
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(result.memory),
        "shrunk": list(experiment.shrunk), "wandb_run": result.wandb_run,
    }  # fmt: skip
    write_atomically(run.record, json.dumps(record, indent=1) + "\n")
    return record


def perplexity(nll: float) -> float:
    """Returns exp(nll); infinite above 709 nats, as of a model that diverged."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _scores(measure: str, result: RunResult) -> dict[str, Any]:
    """Returns the scores on held-out data; of a language model also perplexity and bits per byte, which does not depend
    on the tokenizer: nats per token / ln 2 / bytes per token."""
    scores: dict[str, Any] = {name: value for name, value in result.validated.items() if value is not None}
    if result.baselines:
        scores |= {f"baseline_{measure}": next(iter(result.baselines.values())), "baselines": result.baselines}
    nats = scores.get(f"valid_{measure}")
    if nats is not None and result.bytes_per_unit is not None:
        scores |= {
            "valid_perplexity": value if math.isfinite(value := perplexity(nats)) else None,
            "valid_bits_per_byte": nats / math.log(2) / result.bytes_per_unit,
            "bytes_per_token": result.bytes_per_unit,
        }
    return scores


_SHARES = {"mfu": MFU, "hfu": HFU}


@dataclass
class _StepSums:
    """Sums over the steps of all attempts."""

    loss_first: float | None = None
    loss_last: float | None = None
    seconds: float = 0.0
    known_seconds: float = 0.0
    """Of the steps whose utilization is known."""
    busy_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SHARES, 0.0))
    """Utilization times seconds."""

    @classmethod
    def of(cls, run: RunFolder) -> _StepSums:
        """Reads the steps one by one: there may be millions."""
        sums = cls()
        for at, step in enumerate(every_step(run.metrics)):
            if at == 0:
                sums.loss_first = step[LOSS]
            sums.loss_last = step[LOSS]
            sums.seconds += step[STEP_S]
            if MFU in step:
                sums.known_seconds += step[STEP_S]
                for name, key in _SHARES.items():
                    sums.busy_seconds[name] += step[key] * step[STEP_S]
        return sums


def _utilization(sums: _StepSums, peak: Peak | None) -> dict[str, Any]:
    """Returns MFU and HFU over all steps of this and earlier attempts, and what they are a share of."""
    if peak is None or not sums.known_seconds:
        return {}
    shares = {name: busy / sums.known_seconds for name, busy in sums.busy_seconds.items()}
    return {**shares, "peak_flops_per_s": peak.flops_per_s, "peak_source": peak.source}
