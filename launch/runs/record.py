"""``record.json``: the results of a finished run, for reports and for the summary at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from launch.runs.store import RunFolder
from suite.paths import write_atomically
from suite.pipeline.model.layers import count_parameters
from suite.training.loop import Progress, TrainingSetup
from suite.training.metrics import HFU, LOSS, MFU, STEP_S, every_step
from suite.training.utilization import Utilization
from suite.training.validation import Validation


def write_record(
    run: RunFolder,
    experiment: Experiment,
    layers: list[nn.Module],
    setup: TrainingSetup,
    source: DataSource,
    progress: Progress,
    memory: Sequence[int],
    wandb_run: str | None,
) -> dict[str, Any]:
    """Writes the record atomically and returns it. Seconds count only steps, over all attempts; losses are in nats per
    token or image; ``memory`` are the peak bytes of each worker."""
    over_steps = _over_steps(run, setup.utilization)
    pipeline, units = experiment.pipeline, progress.units
    record = {
        "name": experiment.name, "scale": experiment.scale, "data": experiment.data,
        "K": pipeline.stages, "R": pipeline.replicas, "M": pipeline.micro_batches,
        "layers": len(layers), "parameters": count_parameters(layers),
        "counts": source.counts(), "steps": progress.step, "unit": experiment.unit,
        "measure": experiment.metric_name, experiment.unit: units,
        f"{experiment.unit}_per_second": units / over_steps["seconds"], **over_steps,
        **_scores(experiment, setup.validation, source, progress.step),
        "threads": torch.get_num_threads(), "peak_memory_bytes": sum(memory),
        "shrunk": list(experiment.shrunk), "wandb_run": wandb_run,
    }  # fmt: skip
    write_atomically(run.record, json.dumps(record, indent=1) + "\n")
    return record


def perplexity(nll: float) -> float:
    """Returns exp(nll); infinite above 709 nats, as of a model that diverged."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _scores(experiment: Experiment, validation: Validation | None, source: DataSource, step: int) -> dict[str, Any]:
    """Returns the model's score on held-out data, those without the model, the best validation, and why the run stopped
    early, each if there is one; of a language model also perplexity and bits per byte, which does not depend on the
    tokenizer: nats per token / ln 2 / bytes per token."""
    if validation is None:
        return {"stopped_early": False}
    figures, measure = validation.figures(step), experiment.metric_name
    scores: dict[str, Any] = {f"valid_{experiment.unit}": figures.weights} if figures.weights else {}
    scores |= {f"valid_{name}": value for name, value in zip(experiment.metric_names, figures.metrics, strict=True)}
    best = {
        "best_step": validation.state.best_step,
        "validations_without_improvement": validation.state.unimproved,
        f"best_valid_{experiment.criterion.name}": validation.state.best,
        "stopped_early": validation.stopped_early(step) or False,
    }
    scores |= {name: value for name, value in best.items() if value is not None}
    if baselines := source.baselines(validation.held_out):
        scores |= {f"baseline_{measure}": next(iter(baselines.values())), "baselines": baselines}
    bytes_per_unit = source.bytes_per_unit(validation.held_out)
    nats = scores.get(f"valid_{measure}")
    if nats is not None and bytes_per_unit is not None:
        scores |= {
            "valid_perplexity": value if math.isfinite(value := perplexity(nats)) else None,
            "valid_bits_per_byte": nats / math.log(2) / bytes_per_unit,
            "bytes_per_token": bytes_per_unit,
        }
    return scores


def _over_steps(run: RunFolder, utilization: Utilization | None) -> dict[str, Any]:
    """Returns the seconds, the first and the last loss, and if known MFU and HFU and what they are a share of, over the
    steps of all attempts. It reads them one by one: there may be millions."""
    sums: dict[str, Any] = {"seconds": 0.0, "loss_first": None, "loss_last": None}
    known_s = model_s = hardware_s = 0.0
    for at, step in enumerate(every_step(run.metrics)):
        if at == 0:
            sums["loss_first"] = step[LOSS]
        sums["loss_last"] = step[LOSS]
        sums["seconds"] += step[STEP_S]
        if MFU in step:
            known_s += step[STEP_S]
            model_s += step[MFU] * step[STEP_S]
            hardware_s += step[HFU] * step[STEP_S]
    if utilization is not None and known_s:
        peak = utilization.peak
        sums |= {"mfu": model_s / known_s, "hfu": hardware_s / known_s}
        sums |= {"peak_flops_per_s": peak.flops_per_s, "peak_source": peak.source}
    return sums
