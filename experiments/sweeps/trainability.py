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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.base.cluster import Cluster
from experiments.report.page import Section
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member, folder_name
from experiments.sweeps.report.figures import layer_curves
from experiments.sweeps.report.margins import t_margin
from experiments.sweeps.report.results import Results, Run
from experiments.sweeps.sweep import Sweep
from experiments.translation.runs import t128_6b
from experiments.translation.scales import LAPTOP, TINY_TEXT, shrunk_by
from suite.training.jsonl import read_lines
from suite.training.metrics import APPLIED, GRAD_NORM, LOSS, every_step

NAME = "trainability"

RULES = {
    "laptop": replace(LAPTOP, steps=150, batch_tokens=512, micro_batches=2, most_stages=1, threads=1,
                      checkpoint_every=75, warmup_steps=15),
    "tiny": replace(TINY_TEXT, corpus_languages=None, train_pairs=None, most_stages=5),  # T(1) has five layers
    "paper": None,
}  # fmt: skip
"""Rules by scale. The laptop scale keeps the depth but not the steps; the paper's problems appear after thousands."""

STARTS = {
    "small steps": "model.depth_scaled_init=true model.residual_scale=1",
    "scaled start": "model.depth_scaled_init=true model.residual_scale=none",
    "plain start": "model.depth_scaled_init=false model.residual_scale=none",
}

DEPTHS = {"laptop": (6, 16, 32, 64), "tiny": (1, 2), "paper": (32, 64)}
"""L by scale. At scale paper 16 stages need more layers than T(6) has."""

HIGH = 3.0
"""The factor of the higher rate."""

SEEDS = 3


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
        optimizer = {"adamw": "AdamW", "adafactor": "Adafactor"}[self.optimizer]
        rate = "" if self.factor == 1 else f", {self.factor:g} x the rate"
        return f"T({self.layers}), {self.start}, {optimizer}{rate}{'' if self.clipped else ', logits not clipped'}"

    def member(self, scale: str, cluster: Cluster, seed: int) -> Member:
        """Returns its run with a seed. Deep ones are trained first."""
        rule = RULES[scale]
        run = t128_6b() if rule is None else shrunk_by(t128_6b(), rule, cluster, scale)
        # at small scales Adafactor's rate is ours; it is relative to the size of a parameter
        rate = run.optimizer.learning_rate if self.optimizer == run.optimizer.name else 0.05
        clipped, unclipped = ("", "") if self.clipped else ("-unclipped", "model.logit_clip=none")
        name = f"{self.start.replace(' ', '-')}-{self.layers}-{self.optimizer}-x{self.factor:g}{clipped}-{seed}"
        run = run.with_settings(
            f"model.blocks_per_stack={self.layers} {STARTS[self.start]} {unclipped} optimizer.name={self.optimizer} "
            f"optimizer.learning_rate={self.factor * rate} train.seed={seed} train.layer_stats_every=10 "
            f"train.max_nonfinite_steps={run.train.steps}"
        )
        return Member(f"{folder_name(NAME, scale)}/{name}", self.label, run, priority=self.layers)


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


def _members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    return [case.member(scale, cluster, seed) for case, seeds in cases(scale).items() for seed in range(seeds)]


def _contents(results: Results, cluster: Cluster) -> tuple[list[Section], list[Table]]:
    by_depth = sorted(cases(results.scale), key=lambda case: case.layers)
    finished = {case: runs for case in by_depth if (runs := results.runs_of(case.label))}
    sentences = [
        "The deepest of the five runs and shallower forms of it, with the same text, tokens and seeds. Small "
        "steps: every block's output matrix starts divided by 2L, and so is its learning rate with AdamW. Scaled "
        "start, the paper's: feed-forward's output matrix starts divided by L, the rate is the same for all. "
        "Adafactor, the paper's optimizer: its step follows the size of a parameter by itself.",
        "A case without an interval has one seed: differences smaller than those between seeds say nothing there.",
        *([f"Not finished: {len(results.missing)} runs."] if results.missing else []),
    ]
    # the curves of small steps and of the paper's start at every depth, at the run's own rate
    curves = [
        (case.label, layers[len(layers) // 2])
        for case, runs in finished.items()
        if case.optimizer == _own_optimizer(results.scale) and case.factor == 1 and case.start != "plain start"
        if (layers := _layers(runs[0]))
    ]
    tables = [_table(finished)]
    sections = [
        Section("What was compared", sentences),
        Section("Runs", tables=tables),
        Section("Layers in the middle of the run", pictures=layer_curves(curves)),
    ]
    return sections, tables


def _layers(run: Run) -> list[dict[str, Any]]:
    """Returns the statistics of the run's layers, at each recorded step."""
    return read_lines(run.folder / "layers.jsonl")


def _decoder(run: Run, statistic: str) -> list[list[float]]:
    """Returns a statistic of the decoder layers at each recorded step, relative to the size of the target embedding's
    output, which is the input of the first one."""
    found = []
    for line in _layers(run):
        first = len(line[statistic]) // 2 + 1  # after two embeddings and as many encoder layers; a head follows
        decoder = line[statistic][first:-1]
        if None not in decoder:
            found.append([value / line["output_rms"][first - 1] for value in decoder])
    return found


def _table(finished: Mapping[Case, Sequence[Run]]) -> Table:
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
    rows = [_row(case, runs) for case, runs in finished.items()]
    return Table(NAME, "Trainability (measured)", headings, rows or [[None] * len(headings)], notes)


def _row(case: Case, runs: Sequence[Run]) -> list[Value]:
    steps = [list(every_step(run.folder / "metrics.jsonl")) for run in runs]
    losses = [_number(step[LOSS]) for of_run in steps for step in of_run[-10:]]
    norms = [norm for of_run in steps for step in of_run if math.isfinite(norm := _number(step[GRAD_NORM]))]
    valid = [float(run.record["valid_nll"]) for run in runs]
    changes = [sum(of_layers) for run in runs for of_layers in _decoder(run, "change_rms")]
    sizes = [of_layers[-1] for run in runs for of_layers in _decoder(run, "output_rms")]
    kurtosis = [value for run in runs for line in _layers(run)[-1:] for value in line["kurtosis"] if value is not None]
    return [
        case.label, len(runs), int(sum(1 - _number(step[APPLIED]) for of_run in steps for step in of_run)),
        statistics.fmean(losses), statistics.fmean(valid), t_margin(valid) or None, max(sizes, default=None),
        max(changes, default=None), statistics.median(norms) if norms else None, max(norms, default=None),
        max(kurtosis, default=None),
    ]  # fmt: skip


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


SWEEP = Sweep(NAME, "Trainability of deep models", _members, _contents, tuple(RULES))
