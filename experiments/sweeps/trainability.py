"""What makes deep models trainable (section 5 of the paper names two measures): how blocks start, clipped logits, at
which depth and rate, with which optimizer.

    start of blocks    small steps    every output matrix starts and moves divided by 2L (``residual_scale``)
                       scaled start   the paper's: feed-forward's output matrix starts divided by L
                       plain start
    depth              T(6), T(16), T(32), T(64), with the widths of the largest run
    optimizer          AdamW, whose step is as long as the rate; Adafactor, the paper's, whose step follows the size
    rate               the scale's, and three times that
    logits             clipped at 30, and not
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import Cluster
from experiments.report.page import Page, Picture, Section
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member, folder_name, read_record
from experiments.sweeps.report.figures import layer_curves
from experiments.sweeps.report.verdicts import t_margin
from experiments.sweeps.text_base import smoke_test
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t128_6b
from experiments.translation.scales import LAPTOP, TINY_TEXT, TextRule, shrunk_by
from suite.training.jsonl import read_lines
from suite.training.metrics import APPLIED, GRAD_NORM, LOSS, every_step

NAME = "trainability"

RULES = {
    "laptop": replace(LAPTOP, steps=150, batch_tokens=512, micro_batches=2, most_stages=1, threads=1,
                      checkpoint_every=75, warmup_steps=15),
    "tiny": replace(TINY_TEXT, corpus_languages=None, train_pairs=None),
    "paper": None,
}  # fmt: skip
"""Rules by scale. The laptop scale keeps the depth but not the steps; the paper's problems appear after thousands."""

STARTS = {"small steps": (True, 1.0), "scaled start": (True, None), "plain start": (False, None)}
"""Values of ``depth_scaled_init`` and ``residual_scale``."""

DEPTHS = {"laptop": (6, 16, 32, 64), "tiny": (1, 2), "paper": (32, 64)}
"""L by scale. At scale paper 16 stages need more layers than T(6) has."""

HIGH = 3.0
"""The factor of the higher rate."""

ADAFACTOR_RATE = 0.05
"""At small scales; relative to the size of a parameter."""

SEEDS = 3

EVERY = 10
"""Steps between records of layer statistics."""


@dataclass(frozen=True)
class Case:
    """A setting that is compared; its runs differ in the seed alone."""

    layers: int
    start: str
    optimizer: str
    factor: float = 1.0
    clipped: bool = True

    @property
    def label(self) -> str:
        """Names it in a report."""
        optimizer = {"adamw": "AdamW", "adafactor": "Adafactor"}[self.optimizer]
        rate = "" if self.factor == 1 else f", {self.factor:g} x the rate"
        return f"T({self.layers}), {self.start}, {optimizer}{rate}{'' if self.clipped else ', logits not clipped'}"

    def experiment(self, rule: TextRule | None, cluster: Cluster, scale: str, seed: int) -> TranslationExperiment:
        """Returns its run with a seed."""
        run = t128_6b() if rule is None else shrunk_by(t128_6b(), rule, cluster, scale)
        scaled, residual = STARTS[self.start]
        model = replace(
            run.model, layers=self.layers, depth_scaled_init=scaled, residual_scale=residual,
            logit_clip=run.model.logit_clip if self.clipped else None,
        )  # fmt: skip
        rate = run.optimizer.learning_rate if self.optimizer == run.optimizer.name else ADAFACTOR_RATE
        train = {"seed": seed, "layer_stats_every": EVERY, "max_nonfinite_steps": run.train.steps}
        return run.model_copy(
            update={
                "model": model,
                "optimizer": run.optimizer.model_copy(
                    update={"name": self.optimizer, "learning_rate": self.factor * rate}
                ),
                "train": run.train.model_copy(update=train),
            }
        )


def cases(scale: str) -> dict[Case, int]:
    """Returns the cases, and how many seeds each has: all starts at the least and the largest depth have every seed,
    and so have small steps between; the other starts between, the higher rate, and logits without a bound have one."""
    depths, main = DEPTHS[scale], _own_optimizer(scale)
    found: dict[Case, int] = {}
    for start in STARTS:
        for optimizer in dict.fromkeys((main, "adafactor")):
            found |= {Case(layers, start, optimizer): SEEDS for layers in (depths[0], depths[-1])}
        found |= {Case(layers, start, main): SEEDS if start == "small steps" else 1 for layers in depths[1:-1]}
        found |= {Case(layers, start, main, HIGH): 1 for layers in (depths[0], depths[-1])}
        found[Case(depths[-1], start, main, HIGH, clipped=False)] = 1
    return found


def _own_optimizer(scale: str) -> str:
    return "adafactor" if RULES[scale] is None else "adamw"


@dataclass(frozen=True)
class FinishedRun:
    """The recorded curves of one finished run."""

    case: Case
    seed: int
    record: dict[str, Any]
    losses: list[float]
    norms: list[float]
    applied: list[float]
    layers: list[dict[str, Any]]

    def decoder(self, statistic: str) -> list[list[float]]:
        """Returns a statistic of the decoder layers at each recorded step, relative to the size of the target
        embedding's output, which is the input of the first one."""
        first, last = self.case.layers + 2, 2 * self.case.layers + 1
        return [
            [value / line["output_rms"][first - 1] for value in line[statistic][first : last + 1]]
            for line in self.layers
            if None not in line[statistic][first : last + 1]
        ]

    @property
    def kurtosis(self) -> float | None:
        """The largest of a layer at the last recorded step."""
        values = [value for value in self.layers[-1]["kurtosis"] if value is not None] if self.layers else []
        return max(values, default=None)


class Trainability:
    """The trainability sweep."""

    name = NAME
    scales: tuple[str, ...] = tuple(RULES)

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns its runs, the deepest ones first."""
        rule, place = RULES[scale], folder_name(NAME, scale)
        return [
            Member(
                f"{place}/{_folder(case)}-{seed}",
                case.label,
                case.experiment(rule, cluster, scale, seed),
                priority=case.layers,
            )
            for case, seeds in cases(scale).items()
            for seed in range(seeds)
        ]

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns the tables, and figures of each layer in the middle of the runs."""
        finished = _read_runs(scale, runs)
        missing = len(self.members(scale, cluster, runs)) - len(finished)
        sentences = [
            "The deepest of the five runs and shallower forms of it, with the same text, tokens and seeds. Small "
            "steps: every block's output matrix starts divided by 2L, and so is its learning rate with AdamW. Scaled "
            "start, the paper's: feed-forward's output matrix starts divided by L, the rate is the same for all. "
            "Adafactor, the paper's optimizer: its step follows the size of a parameter by itself.",
            "A case without an interval has one seed: differences smaller than those between seeds say nothing there.",
            *([f"Not finished: {missing} runs."] if missing else []),
        ]
        return Page(
            f"Trainability of deep models, scale {scale}",
            [
                Section("What was compared", sentences),
                Section("Runs", tables=self._tables(finished)),
                Section("Layers in the middle of the run", pictures=_pictures(finished, _own_optimizer(scale))),
            ],
            warning=smoke_test(scale),
        )

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """The page's tables."""
        return self._tables(_read_runs(scale, runs))

    def _tables(self, finished: Sequence[FinishedRun]) -> list[Table]:
        headings = (
            "case", "runs", "steps skipped", "training loss, last ten steps", "validation, nats a token", "±",
            "size of the decoder's output", "its change by one update", "gradient norm, median", "largest",
            "largest kurtosis of a layer at the end",
        )  # fmt: skip
        notes = [
            "Losses are means over seeds; ± is the 95% interval of the mean over seeds. Skipped steps, medians and "
            "largest values are those of all seeds together. Training losses are label-smoothed; norms are before "
            "clipping.",
            "The size of the decoder's output and its change by one update are root mean squares, relative to the "
            "target embedding's output: the largest of the recorded steps. A change is the sum over the decoder's "
            "layers of each one's change for the same input.",
            "Kurtosis is in excess of the normal distribution's, of a layer's output for one micro-batch.",
        ]
        rows = [_row(case, runs) for case, runs in _by_case(finished)]
        return [Table(NAME, "Trainability (measured)", headings, rows or [[None] * len(headings)], notes)]


SWEEP = Trainability()


def _folder(case: Case) -> str:
    clipped = "" if case.clipped else "-unclipped"
    return f"{case.start.replace(' ', '-')}-{case.layers}-{case.optimizer}-x{case.factor:g}{clipped}"


def _read_runs(scale: str, runs: Path) -> list[FinishedRun]:
    finished = []
    for case, seeds in cases(scale).items():
        for seed in range(seeds):
            folder = runs / folder_name(NAME, scale) / f"{_folder(case)}-{seed}"
            record = read_record(folder)
            if record is None:
                continue
            losses, norms, applied = (
                [math.nan if line[name] is None else float(line[name]) for line in every_step(folder / "metrics.jsonl")]
                for name in (LOSS, GRAD_NORM, APPLIED)
            )
            layers = read_lines(folder / "layers.jsonl")
            finished.append(FinishedRun(case, seed, record, losses, norms, applied, layers))
    return finished


def _by_case(finished: Sequence[FinishedRun]) -> Iterator[tuple[Case, list[FinishedRun]]]:
    """Yields each case with its runs, by depth."""
    for case in sorted(dict.fromkeys(run.case for run in finished), key=lambda case: case.layers):
        yield case, [run for run in finished if run.case == case]


def _row(case: Case, runs: Sequence[FinishedRun]) -> list[Value]:
    valid = [float(run.record["valid_nll"]) for run in runs]
    norms = [norm for run in runs for norm in run.norms if math.isfinite(norm)]
    changes = [sum(of_layers) for run in runs for of_layers in run.decoder("change_rms")]
    sizes = [of_layers[-1] for run in runs for of_layers in run.decoder("output_rms")]
    kurtosis = [run.kurtosis for run in runs if run.kurtosis is not None]
    return [
        case.label, len(runs), int(sum(1 - applied for run in runs for applied in run.applied)),
        statistics.fmean(loss for run in runs for loss in run.losses[-10:]), statistics.fmean(valid),
        t_margin(valid) or None, max(sizes, default=None), max(changes, default=None),
        statistics.median(norms) if norms else None, max(norms, default=None), max(kurtosis, default=None),
    ]  # fmt: skip


def _pictures(finished: Sequence[FinishedRun], optimizer: str) -> list[Picture]:
    """Returns the curves of small steps and of the paper's start at every depth, at the run's own rate."""
    shown = [
        (case.label, runs[0].layers[len(runs[0].layers) // 2])
        for case, runs in _by_case(finished)
        if case.optimizer == optimizer and case.factor == 1 and case.start != "plain start" and runs[0].layers
    ]
    return layer_curves(shown)
