"""What makes the deepest model trainable (section 5 of the paper): a start of feed-forward layers scaled by depth, and
clipped logits, each on and off, at two learning rates.

    T(64, ...), 128 layers    scaled start, clipped logits      the run as it is
                              scaled start                      and so on; norms of gradients and kurtosis of
                              clipped logits                    activations are noted layer by layer
                              neither
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.cluster import Cluster
from experiments.figures import layer_curves
from experiments.page import Page, Section
from experiments.results import read_record
from experiments.scales import TEXT, TextRule, shrunk_by
from experiments.sweep import Member, folder_name
from experiments.table import Table, Value
from experiments.text_experiment import TranslationExperiment
from experiments.translation import t128_6b

NAME = "trainability"

RULES = {
    "laptop": replace(TEXT, steps=150, batch_tokens=512, micro_batches=4, checkpoint_every=75, warmup_steps=15),
    "tiny": replace(
        TEXT, layers_by=12, width_by=64, feed_forward_by=512, head_width_by=8, vocabulary_by=50, corpus="django",
        max_tokens=16, micro_batches=2, batch_tokens=128, steps=4, checkpoint_every=2, valid_pairs=16, warmup_steps=2,
        threads=1,
    ),
    "paper": None,
}  # fmt: skip
"""By scale. On a laptop the depth stays; the steps do not: the paper's trouble shows after a few thousand."""

CASES = {
    "scaled start, clipped logits": (True, True),
    "scaled start": (True, False),
    "clipped logits": (False, True),
    "neither": (False, False),
}
FACTORS = (1.0, 3.0)
"""Of the runs' own learning rate."""

EVERY = 10
"""Steps between what is noted of layers."""


@dataclass(frozen=True)
class Course:
    """What one finished run noted."""

    label: str
    record: dict[str, Any]
    losses: list[float]
    norms: list[float]
    applied: list[float]
    layers: list[dict[str, Any]]


class Trainability:
    """The study."""

    name = NAME
    scales: tuple[str, ...] = tuple(RULES)

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Eight runs of one seed."""
        rule, place = RULES[scale], folder_name(NAME, scale)
        return [
            Member(f"{place}/{_id(case, factor)}", label(case, factor), _run(case, factor, rule, cluster))
            for factor in FACTORS
            for case in CASES
        ]

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """A table, and each layer's norm and kurtosis at the end."""
        members = self.members(scale, cluster, runs)
        courses = _courses(members, runs)
        missing = [one.folder for one in members if one.label not in {course.label for course in courses}]
        sentences = [
            "The deepest of the five runs with its feed-forward layers started smaller by their number and with logits "
            "clipped at 30, as the paper has it, and without either, at its own learning rate and at three times that. "
            "One seed: differences below what another seed would make are not told apart here.",
            *([f"Not finished, and left out: {', '.join(missing)}."] if missing else []),
        ]
        pictures = layer_curves([(one.label, one.layers[-1]) for one in courses if one.layers])
        sections = [Section("What was compared", sentences), Section("Layers at the end", pictures=pictures)]
        return Page(
            f"Trainability of deep models, scale {scale}", [*sections, Section("Runs", tables=[table(courses)])]
        )

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """The page's table."""
        return [table(_courses(self.members(scale, cluster, runs), runs))]


SWEEP = Trainability()


def label(case: str, factor: float) -> str:
    """Returns what a run is called."""
    return case if factor == 1 else f"{case}; {factor:g} x the learning rate"


def _id(case: str, factor: float) -> str:
    return f"{case.replace(', ', '-').replace(' ', '-')}-x{factor:g}"


def _run(case: str, factor: float, rule: TextRule | None, cluster: Cluster) -> TranslationExperiment:
    run = t128_6b() if rule is None else shrunk_by(t128_6b(), rule, cluster)
    scaled, clipped = CASES[case]
    return run.model_copy(
        update={
            "model": replace(run.model, scaled_start=scaled, logit_clip=run.model.logit_clip if clipped else None),
            "optimizer": run.optimizer.model_copy(update={"learning_rate": factor * run.optimizer.learning_rate}),
            "train": run.train.model_copy(update={"sharpness_every": EVERY, "bad_steps_allowed": run.train.steps}),
        }
    )


def _courses(members: Sequence[Member], runs: Path) -> list[Course]:
    found = []
    for member in members:
        folder = runs / member.folder
        record = read_record(folder)
        if record is None:
            continue
        losses, norms, applied = (
            [math.nan if line[name] is None else float(line[name]) for line in _lines(folder / "metrics.jsonl")]
            for name in ("loss", "norm", "applied")
        )
        found.append(Course(member.label, record, losses, norms, applied, _lines(folder / "layers.jsonl")))
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(courses: Sequence[Course]) -> Table:
    """Returns a row a run."""
    headings = (
        "run", "steps left out", "loss, first ten steps", "last ten", "validation", "gradient norm, median", "largest",
        "largest kurtosis of a layer, at the start", "at the end",
    )  # fmt: skip
    rows: list[list[Value]] = [_row(course) for course in courses]
    notes = [
        "Losses in nats a token, label-smoothed; norms before they are bound. Kurtosis above the normal "
        "distribution's, of what a layer gives for one micro-batch.",
    ]
    return Table(NAME, "Trainability (measured)", headings, rows or [[None] * len(headings)], notes)


def _row(course: Course) -> list[Value]:
    norms = [norm for norm in course.norms if math.isfinite(norm)]
    sharpest = [max((one for one in line["kurtosis"] if one is not None), default=None) for line in course.layers]
    return [
        course.label, int(sum(1 - one for one in course.applied)), statistics.fmean(course.losses[:10]),
        statistics.fmean(course.losses[-10:]), course.record["valid_nll"],
        statistics.median(norms) if norms else None, max(norms, default=None),
        sharpest[0] if sharpest else None, sharpest[-1] if sharpest else None,
    ]  # fmt: skip
