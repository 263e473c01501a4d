"""What makes the deepest model trainable (section 5 of the paper): depth-scaled initialization of feed-forward layers
and clipped logits, each on and off, at two learning rates.

    T(64, ...), 128 layers    scaled start, clipped logits      the unchanged run
                              scaled start                      each run records gradient norms and the kurtosis
                              clipped logits                    of activations for every layer
                              neither
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import Cluster
from experiments.report.page import Page, Section
from experiments.report.table import Table, Value
from experiments.scaling.scales import TEXT, TINY_TEXT, TextRule, shrunk_by
from experiments.sweeps.members.base import Member, folder_name, read_record
from experiments.sweeps.report.figures import layer_curves
from experiments.sweeps.text_base import smoke_test
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t128_6b
from suite.training.jsonl import read_lines
from suite.training.metrics import APPLIED, GRAD_NORM, LOSS, every_step

NAME = "trainability"

RULES = {
    "laptop": replace(TEXT, steps=150, batch_tokens=512, micro_batches=4, checkpoint_every=75, warmup_steps=15),
    "tiny": replace(TINY_TEXT, corpus_languages=None, train_pairs=None),
    "paper": None,
}
"""Rules by scale. The laptop scale keeps the depth but not the steps; the paper's problems appear after thousands."""

CASES = {
    "scaled start, clipped logits": (True, True),
    "scaled start": (True, False),
    "clipped logits": (False, True),
    "neither": (False, False),
}
FACTORS = (1.0, 3.0)
"""Factors of the run's learning rate."""

EVERY = 10
"""Steps between records of layer statistics."""


@dataclass(frozen=True)
class LayerCurves:
    """The recorded curves of one finished run."""

    label: str
    record: dict[str, Any]
    losses: list[float]
    norms: list[float]
    applied: list[float]
    layers: list[dict[str, Any]]


class Trainability:
    """The trainability sweep."""

    name = NAME
    scales: tuple[str, ...] = tuple(RULES)

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns eight runs with one seed."""
        rule, place = RULES[scale], folder_name(NAME, scale)
        return [
            Member(f"{place}/{_id(case, factor)}", label(case, factor), _run(case, factor, rule, cluster, scale))
            for factor in FACTORS
            for case in CASES
        ]

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns a table, and each layer's norm and kurtosis at the end."""
        members = self.members(scale, cluster, runs)
        curves_of_all = _read_curves(members, runs)
        finished = {curves.label for curves in curves_of_all}
        missing = [member.folder for member in members if member.label not in finished]
        sentences = [
            "The deepest of the five runs with depth-scaled initialization of its feed-forward layers and with logits "
            "clipped at 30, as in the paper, and without either, at its own learning rate and at three times that. "
            "With one seed, differences smaller than those between seeds cannot be distinguished.",
            *([f"Not finished, and excluded: {', '.join(missing)}."] if missing else []),
        ]
        pictures = layer_curves([(curves.label, curves.layers[-1]) for curves in curves_of_all if curves.layers])
        sections = [Section("What was compared", sentences), Section("Layers at the end", pictures=pictures)]
        return Page(
            f"Trainability of deep models, scale {scale}",
            [*sections, Section("Runs", tables=[table(curves_of_all)])],
            warning=smoke_test(scale),
        )

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """The page's table."""
        return [table(_read_curves(self.members(scale, cluster, runs), runs))]


SWEEP = Trainability()


def label(case: str, factor: float) -> str:
    """Returns a run's label."""
    return case if factor == 1 else f"{case}; {factor:g} x the learning rate"


def _id(case: str, factor: float) -> str:
    return f"{case.replace(', ', '-').replace(' ', '-')}-x{factor:g}"


def _run(case: str, factor: float, rule: TextRule | None, cluster: Cluster, scale: str) -> TranslationExperiment:
    run = t128_6b() if rule is None else shrunk_by(t128_6b(), rule, cluster, scale)
    scaled, clipped = CASES[case]
    return run.model_copy(
        update={
            "model": replace(run.model, depth_scaled_init=scaled, logit_clip=run.model.logit_clip if clipped else None),
            "optimizer": run.optimizer.model_copy(update={"learning_rate": factor * run.optimizer.learning_rate}),
            "train": run.train.model_copy(update={"layer_stats_every": EVERY, "max_nonfinite_steps": run.train.steps}),
        }
    )


def _read_curves(members: Sequence[Member], runs: Path) -> list[LayerCurves]:
    curves_of_all = []
    for member in members:
        folder = runs / member.folder
        record = read_record(folder)
        if record is None:
            continue
        losses, norms, applied = (
            [math.nan if line[name] is None else float(line[name]) for line in every_step(folder / "metrics.jsonl")]
            for name in (LOSS, GRAD_NORM, APPLIED)
        )
        layers = read_lines(folder / "layers.jsonl")
        curves_of_all.append(LayerCurves(member.label, record, losses, norms, applied, layers))
    return curves_of_all


def table(curves_of_all: Sequence[LayerCurves]) -> Table:
    """Returns one row per run."""
    headings = (
        "run", "steps skipped", "loss, first ten steps", "last ten", "validation", "gradient norm, median", "largest",
        "largest kurtosis of a layer, at the start", "at the end",
    )  # fmt: skip
    rows: list[list[Value]] = [_row(curves) for curves in curves_of_all]
    notes = [
        "Losses in nats per token, label-smoothed; norms before clipping. Excess kurtosis of a layer's output for one "
        "micro-batch.",
    ]
    return Table(NAME, "Trainability (measured)", headings, rows or [[None] * len(headings)], notes)


def _row(curves: LayerCurves) -> list[Value]:
    norms = [norm for norm in curves.norms if math.isfinite(norm)]
    largest = [max((value for value in line["kurtosis"] if value is not None), default=None) for line in curves.layers]
    return [
        curves.label, int(sum(1 - applied for applied in curves.applied)), statistics.fmean(curves.losses[:10]),
        statistics.fmean(curves.losses[-10:]), curves.record["valid_nll"],
        statistics.median(norms) if norms else None, max(norms, default=None),
        largest[0] if largest else None, largest[-1] if largest else None,
    ]  # fmt: skip
