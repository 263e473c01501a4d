"""Accuracy of plans: step time and peak memory of three models, planned from measured layer costs and then run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from experiments.base.workload import SingleThreadWorkload, random_ids
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.language_model.runs import language_model
from experiments.report.table import Table, Value, relative_spread
from launch.backends.processes import run_processes
from launch.planning.layer_costs import MeasuredCosts
from launch.runs.store import RUNS
from launch.worker import measure
from launch.worker.devices import cores
from models import transformer
from models.language_model import LanguageModelShape
from models.loss import ClassificationLoss, TranslationLoss
from models.transformer import TransformerShape
from suite.log import Log
from suite.pipeline.model.layers import meta_device
from suite.pipeline.planning.fit import Problem
from suite.pipeline.planning.memory import bytes_per_parameter
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.sample import MicroBatch, Sample
from suite.settings import PipelineSettings
from tests.gpu.peak import measure_peak_bytes
from tests.models import resnet

ROUNDS = 3
"""Rounds of planning and running, alternating."""

FOLDER = RUNS / "tables"

PIPELINE = PipelineSettings(stages=2, micro_batches=8)


@dataclass(frozen=True)
class EncoderDecoder(SingleThreadWorkload):
    """T(4, 1024, 4) of width 256: two kinds of layers, two embeddings, a head."""

    name = "encoder-decoder, T(4, 1024, 4), width 256"
    pipeline = PIPELINE

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        shape = TransformerShape(blocks_per_stack=4, width=256, feed_forward=1024, heads=4, vocabulary=4000)
        with meta_device():
            return transformer.layers(shape), TranslationLoss(0.1)

    def sample(self) -> Sample:
        ids = random_ids(4, 128, 4000)
        micro_batch = MicroBatch((ids, ids), (ids,))
        return Sample(micro_batch, micro_batch)


@dataclass(frozen=True)
class Convolutional(SingleThreadWorkload):
    """Convolutions over images of 32 x 32: uneven layers, each group with half the size and twice the width."""

    name = "convolutional, 9 blocks of width 48 to 192"
    pipeline = PIPELINE

    def build(self) -> tuple[list[nn.Module], nn.Module]:
        with meta_device():
            return resnet.layers(width=48, blocks=3, classes=10), ClassificationLoss(0.0)

    def sample(self) -> Sample:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(16, 3, 32, 32, generator=generator)
        micro_batch = MicroBatch((images,), (torch.randint(0, 10, (16,), generator=generator),))
        return Sample(micro_batch, micro_batch)


def decoder_only() -> LanguageModelExperiment:
    """Returns a Transformer-8 of width 512: one kind of layer, and a head as expensive as four layers."""
    shape = LanguageModelShape(
        blocks_per_stack=8, width=512, feed_forward=2048, heads=8, vocabulary=4000, context_length=128
    )
    run = language_model(shape, PIPELINE, sequences=16)
    return run.model_copy(update={"name": "decoder only, Transformer-8, width 512"})


PredictedModel = EncoderDecoder | Convolutional | LanguageModelExperiment


@dataclass(frozen=True)
class Round:
    """One prediction and the run after it."""

    predicted_s: float
    measured_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]


def prediction_table(log: Log) -> Table:
    """Compares predicted with measured values, after several rounds of planning and running."""
    rows: list[dict[str, Value]] = []
    for work in (EncoderDecoder(), decoder_only(), Convolutional()):
        rounds = [plan_and_run(work, at, log) for at in range(ROUNDS)]
        predicted = statistics.median(each.predicted_s for each in rounds)
        steps = [each.measured_s for each in rounds]
        measured = statistics.median(steps)
        ratios = [
            predicted_bytes / measured_bytes
            for each in rounds
            for predicted_bytes, measured_bytes in zip(each.predicted_bytes, each.measured_bytes, strict=True)
        ]
        rows.append(
            {
                "model": work.name,
                "step s (simulated)": predicted,
                "step s (measured)": measured,
                "spread": relative_spread(steps),
                "simulated / measured": predicted / measured,
                "fullest stage MiB (measured)": max(rounds[-1].measured_bytes) / 2**20,
                "least predicted / measured bytes": min(ratios),
                "most predicted / measured bytes": max(ratios),
            }
        )
    notes = [
        "K = 2 stages in two processes of one thread each, M = 8, fp32, AdamW. Layer costs are measured in both "
        "processes at once; each round measures, plans and runs; medians over rounds.",
        "Bytes are those of torch's allocator, from the first weight to the end of the second step, stage by stage.",
    ]
    values = [list(row.values()) for row in rows]
    return Table("prediction", "Plan against run, real layers", list(rows[0]), values, notes)


def plan_and_run(work: PredictedModel, at: int, log: Log) -> Round:
    """Plans a work from newly measured costs, and runs it."""
    cache = FOLDER / "costs"
    for cached_file in cache.glob("*.json"):
        cached_file.unlink()  # each round measures anew
    found = MeasuredCosts(cache, lambda text: None)(work, cores())
    parameter_bytes = bytes_per_parameter(work.optimizer, replicas=1)
    plan = make_plan(Problem(found.costs, work.pipeline, parameter_bytes, found.machine))
    run = measure.MeasuredPipeline(work, plan.layers_per_cell, plan.schedule_config)
    steps: list[measure.Steps] = run_processes(measure.measure_steps, work.pipeline.stages, run, 7)
    peaks: list[int] = run_processes(measure_peak_bytes, work.pipeline.stages, run)
    measured_s = statistics.median(measure.slowest_s(steps))
    planned_bytes = tuple(stage.peak_bytes - found.machine.process_bytes for stage in plan.cells)
    log(f"{work.name}, round {at + 1}: predicted {plan.step_s:.3f} s, measured {measured_s:.3f} s")
    return Round(plan.step_s, measured_s, planned_bytes, tuple(peaks))
