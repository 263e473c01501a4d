"""A sweep on text, and its report: verdicts, then the paper's figure, tables, loss curves, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.page import Page, Section
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.tuning import BaselineRuns, best_setting, tuning_table
from experiments.sweeps.report.figures import against_bilingual, by_third_pictures, loss_curves
from experiments.sweeps.report.results import BILINGUAL_MODELS, Results, read_results
from experiments.sweeps.report.score_tables import (
    bilingual_name,
    by_direction,
    by_language,
    by_model,
    by_third,
    overlap_table,
)
from experiments.sweeps.report.verdicts import FEWEST_FOR_A_CLAIM, LEVEL, Comparison, Gain, Verdict
from experiments.translation.experiment import TranslationExperiment


@dataclass(frozen=True)
class TextSweep:
    """A family of runs on text."""

    name: str
    title: str
    about: str
    """One or two sentences on what is compared and what is equal."""
    runs_of: Callable[[str, Cluster, Path], list[Member]]
    """The runs at a scale, below the folder of all runs."""
    findings: tuple[Callable[[Results], list[Verdict]], ...] = ()
    own_tables: tuple[Callable[[Results], Table], ...] = ()
    others: Callable[[str, Cluster, Path], list[Member]] | None = None
    """Runs of another sweep that the report shows if they are finished."""
    baselines: Callable[[str, Cluster], list[tuple[str, BaselineRuns]]] | None = None
    """Labels and runs of the tuned baselines."""
    scales: tuple[str, ...] = ("laptop", "tiny", "paper")

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns its runs. A run with two labels appears twice, with one folder."""
        return self.runs_of(scale, cluster, runs)

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns the report of the finished runs."""
        results = self._results(scale, cluster, runs)
        tables = [make(results) for make in self.own_tables]
        if results.multilingual_labels:
            tables += [by_third(results), by_model(results), by_language(results), _directions(results)]
        bilingual = against_bilingual(results)
        baselines = self.baselines(scale, cluster) if self.baselines is not None else []
        return text_page(
            self.title,
            scale,
            [
                self.about,
                *_rule(results),
                *still_improving(results),
                *missing(results),
                *self._not_tuned(scale, cluster, runs),
            ],
            results,
            self._verdicts(results),
            Section(
                "Scores", tables=tables, pictures=[*by_third_pictures(results), *([bilingual] if bilingual else [])]
            ),
            [tuning_table(baselines, runs)] if baselines else [],
        )

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Returns the verdicts and the scores by third."""
        results = self._results(scale, cluster, runs)
        tables = [verdict_table(self._verdicts(results)), *(make(results) for make in self.own_tables)]
        return [*tables, by_third(results)] if results.multilingual_labels else tables

    def _results(self, scale: str, cluster: Cluster, runs: Path) -> Results:
        found = read_results(scale, _scored(self.members(scale, cluster, runs)), runs)
        if self.others is None:
            return found
        others = read_results(scale, _scored(self.others(scale, cluster, runs)), runs)
        return replace(found, runs=found.runs + others.runs)

    def _not_tuned(self, scale: str, cluster: Cluster, runs: Path) -> list[str]:
        """Returns a sentence with the baselines that have no chosen setting yet."""
        tuned = self.baselines(scale, cluster) if self.baselines is not None else []
        names = [name for name, alone in tuned if best_setting(alone, runs) is None]
        return [f"Not tuned yet, and excluded from all numbers: {', '.join(names)}."] if names else []

    def _verdicts(self, results: Results) -> list[Verdict]:
        return [verdict for finding in self.findings for verdict in finding(results)]


def text_page(
    title: str, scale: str, about: list[str], results: Results, verdicts: list[Verdict], scores: Section,
    tuning: list[Table],
) -> Page:  # fmt: skip
    """Returns the report of a sweep on text."""
    losses = loss_curves(results)
    return Page(
        f"{title}, scale {scale}",
        [
            Section("What was compared", about),
            Section("Findings", tables=[verdict_table(verdicts)]),
            scores,
            Section("Leakage", tables=[overlap_table(results), distinct_table(verdicts)]),
            *([Section("Tuning", tables=tuning)] if tuning else []),
            Section("Losses", pictures=[losses] if losses else []),
            Section("Runs", tables=[runs_table(results)], sentences=signatures(results)),
        ],
        warning=smoke_test(scale),
    )


def _directions(results: Results) -> Table:
    models = [(label, label, results.languages) for label in results.multilingual_labels]
    if results.baselines:
        models.append((bilingual_name(results), BILINGUAL_MODELS, results.baselines))
    return by_direction(results, models)


def _scored(members: list[Member]) -> list[Member]:
    return [member for member in members if member.scoring is not None]


def verdict_table(verdicts: list[Verdict]) -> Table:
    """Returns a row for each comparison of each finding."""
    rows: list[list[Value]] = []
    for verdict in verdicts:
        for at, (where, found) in enumerate(verdict.parts or [("", None)]):
            first = [verdict.finding, verdict.paper, verdict.outcome] if at == 0 else ["", "", ""]
            rows.append([*first, where, *(_cells(found) if found is not None else [None] * 3)])
    headings = ("finding", "in the paper", "verdict", "where", "nats a token saved", "chrF gained", "seeds that agree")
    return Table(
        "findings", "The paper's findings, here", headings,
        rows or [["this sweep tests none of them", *[""] * (len(headings) - 1)]],
        [
            f"Findings tested: {len(verdicts)}. ± is the margin for the variation between seeds at 95%: t * s * "
            "sqrt(1/a + 1/b) for means over a and b seeds, s pooled over all models compared.",
            "Confirmed: nats a token saved and chrF gained are both above their margins (in every third, if the "
            f"finding is about all), and chrF is higher with p < {LEVEL} for every seed, by a paired bootstrap over "
            "test pairs. Contradicted: one is below minus its margin, the other not above its own, and chrF is lower "
            "with the same p (in one third, if the finding is about all). Undecided: anything else, all with one seed "
            f"or a missing one, and all with fewer than {FEWEST_FOR_A_CLAIM} test pairs in total over the languages "
            "compared. Nothing is corrected for the number of findings. A seed agrees if its chrF difference has the "
            f"sign of the mean and p < {LEVEL}. A third marked - does not count for the verdict.",
        ],
    )  # fmt: skip


def _cells(found: Comparison) -> list[Value]:
    agree = f"{found.clear_seeds} of {found.seeds}" if found.tests else None
    if found.pairs < FEWEST_FOR_A_CLAIM:
        agree = f"{agree or '-'}; {found.pairs} test pairs are too few for a claim"
    return [*_gain(found.gain), agree]


def _gain(gain: Gain) -> list[Value]:
    return [None if each is None else str(each) for each in (gain.nll, gain.chrf)]


def distinct_table(verdicts: list[Verdict]) -> Table:
    """Returns the findings' gains on the test pairs without a near-duplicate in the training text."""
    rows: list[list[Value]] = [
        [verdict.finding if at == 0 else "", where, *_gain(found.distinct)]
        for verdict in verdicts
        for at, (where, found) in enumerate(verdict.parts)
    ]
    headings = ("finding", "where", "nats a token saved", "chrF gained")
    notes = ["Measured; ± as in the findings. These gains do not enter the verdicts."]
    return Table("distinct", "The findings without near-duplicates", headings, rows or [["", "", None, None]], notes)


def _rule(results: Results) -> list[str]:
    """Returns how the scale changed the paper's runs, from their records."""
    if not results.runs:
        return ["No member of this sweep is finished and scored yet."]
    run = results.runs[0]
    shrunk = run.record["shrunk"]
    count = len({each.member.folder for each in results.runs})  # a run with two labels counts once
    text = f"{count} runs are finished and scored, on {run.record['data']}"
    return [f"{text}. Changed from the paper's {run.record['name']}: {', '.join(shrunk)}." if shrunk else f"{text}."]


def smoke_test(scale: str) -> str:
    """Returns a warning for the scale that only tests a sweep; empty for others."""
    return "A smoke test: at scale tiny the models learn nothing, and no number here means anything." * (
        scale == "tiny"
    )


def missing(results: Results) -> list[str]:
    """Returns a sentence with the members that are not finished."""
    if not results.missing:
        return []
    folders = ", ".join(dict.fromkeys(member.folder for member in results.missing))
    return [f"Not finished or not scored, and excluded from all numbers: {folders}."]


def still_improving(results: Results) -> list[str]:
    """Returns a sentence with the labels of runs whose last validation was the best: they could still improve."""
    counts: dict[str, int] = {}
    for run in {run.folder: run for run in results.runs}.values():
        if run.record.get("best_step") == run.member.experiment.train.steps:
            counts[run.member.label] = counts.get(run.member.label, 0) + 1
    if not counts:
        return []
    listed = "; ".join(f"{label} ({count} of {len(results.runs_of(label))} runs)" for label, count in counts.items())
    return [f"Best at the largest number of steps, so more steps could improve them further: {listed}."]


def runs_table(results: Results) -> Table:
    """Returns one row per run."""
    rows: list[list[Value]] = [
        [
            run.member.folder, run.member.label, run.record["K"], run.record["steps"], run.record.get("best_step"),
            run.record["tokens"],
            run.record["seconds"], run.record["tokens_per_second"], run.record["loss_last"],
            run.record.get("best_valid_nll") or run.record["valid_nll"],
            run.scores["seconds"], run.scores["sentences_per_second"],
        ]
        for run in results.runs
    ]  # fmt: skip
    headings = (
        "run", "what", "K", "steps", "best step", "tokens", "training s", "tokens/s", "last loss",
        "best validation NLL", "decoding s", "sentences/s",
    )  # fmt: skip
    return Table("runs", "All runs (measured)", headings, rows or [[None] * len(headings)], [])


def signatures(results: Results) -> list[str]:
    """Returns how the runs were scored, in a sentence."""
    if not results.runs:
        return []
    scores = results.runs[0].scores
    pairs = "all pairs" if scores["max_pairs"] is None else f"{scores['max_pairs']} pairs per direction at most"
    experiment = results.runs[0].member.experiment
    assert isinstance(experiment, TranslationExperiment)
    pairs += f", none with more than {experiment.text.max_length} tokens per side"
    signed = "; ".join(f"{name}: {signature}" for name, signature in scores["signatures"].items())
    penalty = scores["length_penalty"]
    return [f"Beam {scores['beam']}, length penalty {penalty:g}, the {scores['split']} split, {pairs}. {signed}."]
