"""The results of a sweep's runs on text, by seed: their records, scores and losses.

Means are over both directions of a language, then over the languages of a third, then over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.sweeps.members.base import Member, read_record
from experiments.sweeps.members.scales import baseline_label
from experiments.sweeps.report.margins import mean_and_margin
from experiments.translation.experiment import TranslationExperiment
from suite.data.text.tokenizer import ENGLISH
from suite.evaluation.scores import Third
from suite.training.metrics import LOSS, read_steps, units_done

BILINGUAL_MODELS = "bilingual"
"""The label of the bilingual models together, each in its own language."""


@dataclass(frozen=True)
class Metric:
    """A score of a language."""

    name: str
    """nll, chrf, bleu"""
    plain: bool = False
    """Whether it counts only test pairs without a placeholder."""
    copied: bool = False
    """Whether it scores the source itself in place of a translation."""
    into_english: bool | None = None
    """None: the mean of both directions."""


NLL, CHRF = Metric("nll"), Metric("chrf")


@dataclass(frozen=True)
class Run:
    """One finished member."""

    member: Member
    folder: Path
    record: dict[str, Any]
    scores: dict[str, Any]
    """Empty for a run that is not scored."""

    @property
    def experiment(self) -> TranslationExperiment:
        """Its experiment, of a sweep on text."""
        assert isinstance(self.member.experiment, TranslationExperiment)
        return self.member.experiment

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(tokens seen, loss in nats per token) of each step with a finite loss."""
        tokens, steps = units_done("tokens"), read_steps(self.folder / "metrics.jsonl")
        return [(int(step[tokens]), float(step[LOSS])) for step in steps if step[LOSS] is not None]

    @property
    def languages(self) -> list[str]:
        """The languages it was scored in, without English."""
        return sorted({direction.replace("en-", "").replace("-en", "") for direction in self.scores["directions"]})

    @property
    def seed(self) -> int:
        return self.member.experiment.train.seed

    def score(self, language: str, metric: Metric) -> float | None:
        """Returns a score of a language; None without it."""
        directions = self.scores["directions"]
        found = [directions[pair] for pair in directions_of(language, metric.into_english) if pair in directions]
        found = [scores["plain"] if metric.plain else scores for scores in found]
        values = [scores["copy"].get(metric.name) if metric.copied else scores[metric.name] for scores in found]
        return statistics.fmean(values) if values and None not in values else None

    def lines(self, direction: str, kind: str) -> tuple[str, ...]:
        """Returns its translations (``hyp``) in a direction, or their references (``ref``)."""
        return tuple((self.folder / "scores" / f"{direction}.{kind}").read_text(encoding="utf-8").splitlines())


def directions_of(language: str, into_english: bool | None) -> tuple[str, ...]:
    """Returns the names of a language's two directions, or of the one into or out of English."""
    out, into = f"{ENGLISH}-{language}", f"{language}-{ENGLISH}"
    if into_english is None:
        return out, into
    return (into,) if into_english else (out,)


@dataclass(frozen=True)
class Results:
    """The finished runs of a sweep, and the missing ones."""

    scale: str
    folder: Path
    """Of all runs."""
    runs: tuple[Run, ...]
    missing: tuple[Member, ...]

    def runs_of(self, label: str) -> list[Run]:
        return [run for run in self.runs if run.member.label == label]

    @cached_property
    def labels(self) -> list[str]:
        """All labels in the order of the sweep."""
        return list(dict.fromkeys(run.member.label for run in self.runs))

    @cached_property
    def multilingual_labels(self) -> list[str]:
        return [label for label in self.labels if len(self.runs_of(label)[0].languages) > 1]

    @cached_property
    def thirds(self) -> dict[str, Third]:
        """The third of each language that the multilingual runs are scored in."""
        return next((run.scores["thirds"] for run in self.runs if len(run.languages) > 1), {})

    @cached_property
    def languages(self) -> list[str]:
        """The languages of the multilingual runs, sorted by descending number of training pairs."""
        return sorted(self.thirds, key=lambda language: (-self.train_pairs(language), language))

    @cached_property
    def baselines(self) -> list[str]:
        """The languages with a bilingual run."""
        return [language for language in self.languages if self.runs_of(baseline_label(language))]

    def train_pairs(self, language: str) -> int:
        """Returns D_l, the training pairs of a language."""
        return int(self._out_of_english(language).get("train_pairs", 0))

    def test_pairs(self, language: str) -> int:
        """Returns the scored test pairs of a language."""
        return int(self._out_of_english(language).get("pairs", 0))

    def _out_of_english(self, language: str) -> dict[str, Any]:
        directions = (run.scores["directions"].get(f"{ENGLISH}-{language}") for run in self.runs)
        return next(filter(None, directions), {})

    def in_third(self, third: Third | None, among: Iterable[str] | None = None) -> list[str]:
        """Returns the languages of a third, or of all."""
        chosen = self.languages if among is None else list(among)
        return [language for language in chosen if third is None or self.thirds.get(language) == third]

    @property
    def members(self) -> list[Member]:
        """All members of the sweep that are compared, finished or not."""
        return [*(run.member for run in self.runs), *self.missing]

    def model_of(self, label: str, languages: Sequence[str]) -> dict[int, tuple[Run, ...]]:
        """Returns the run that translates each of the languages, by seed. ``BILINGUAL_MODELS`` are the languages' own
        models, for each seed that all of them have."""
        labels = [baseline_label(each) if label == BILINGUAL_MODELS else label for each in languages]
        columns = [{run.seed: run for run in self.runs_of(each)} for each in labels]
        seeds = sorted(set.intersection(*map(set, columns))) if columns else []
        return {seed: tuple(column[seed] for column in columns) for seed in seeds}

    def by_seed(self, label: str, languages: Sequence[str], metric: Metric) -> dict[int, float]:
        """Returns a label's mean over the languages, by seed; only of seeds that have all scores."""
        means = {}
        for seed, runs in self.model_of(label, languages).items():
            scores = [run.score(language, metric) for run, language in zip(runs, languages, strict=True)]
            found = [score for score in scores if score is not None]
            if len(found) == len(scores):
                means[seed] = statistics.fmean(found)
        return means

    def means(self, label: str, languages: Sequence[str], metric: Metric) -> list[float]:
        return list(self.by_seed(label, languages, metric).values())

    def shown(self, label: str, languages: Sequence[str], metric: Metric) -> str | None:
        """Returns ``mean ± margin`` over the seeds; the score of a copied source, which is the same with every seed."""
        means = self.means(label, languages, metric)
        return mean_and_margin(means[:1] if metric.copied else means)


def read_results(scale: str, members: Sequence[Member], runs: Path) -> Results:
    """Reads the results of members below the folder of all runs. In a sweep that scores, runs without scores only tune
    others, and are left out."""
    finished, missing = [], []
    for member in [member for member in members if member.scoring is not None] or members:
        folder = runs / member.folder
        record, scores = read_record(folder), read_record(folder, "scores.json") or {}
        if record is None or not is_scored(member, record, scores):
            missing.append(member)
        else:
            finished.append(Run(member, folder, record, scores))
    return Results(scale, runs, tuple(finished), tuple(missing))


def scored_step(record: dict[str, Any]) -> int:
    """Returns the step of the checkpoint that ``make score`` uses: the best where validations chose one."""
    return int(record.get("best_step") or record["steps"])


def is_scored(member: Member, record: dict[str, Any], scores: dict[str, Any]) -> bool:
    """Whether scores are of the finished run with the sweep's scoring settings; others are not comparable."""
    if member.scoring is None:
        return True
    if not scores:
        return False
    wanted = {"step": scored_step(record), "beam": member.scoring.beam, "max_pairs": member.scoring.max_pairs}
    assert isinstance(member.experiment, TranslationExperiment)
    text = member.experiment.text
    languages = member.scoring.languages or text.languages or text.corpus_languages
    scored = {code for direction in scores.get("directions", {}) for code in direction.split("-")} - {ENGLISH}
    return (
        member.experiment.is_finished(record)
        and all(scores.get(name) == value for name, value in wanted.items())
        and (languages is None or scored == set(languages))
    )
