"""Compares the paper's findings with the measured results: confirmed, not confirmed, or undecided, by one rule.

Two measures of the test pairs decide together, nats per token saved and chrF gained, and two kinds of chance: of the
seeds, and of the test sentences.

    |---- margin ----|---- margin ----|        margin = t(95%, f) * s * sqrt(1/a + 1/b)
  not confirmed    0 undecided     confirmed   for the difference of means over a and b seeds

s is the standard deviation between seeds, pooled over all models of the sweep (with two seeds a model, that of one
model alone is worth little), f its degrees of freedom: Student's test for two means at 95%. It covers the seeds'
chance. For that of the test sentences, sacreBLEU's paired bootstrap of the chrF difference must have p < 0.05 with
every seed, and the difference the same sign with each. Neither covers the choice of languages. With one seed, with a
seed of one model missing, or with too few test pairs nothing is decided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.scaling.scales import SWEEPS
from experiments.sweeps.members.multilingual import MODELS, SMALLEST
from experiments.sweeps.report.results import BILINGUAL_MODELS, Results
from suite.evaluation.scores import THIRDS, PairedTest, Third, paired_bootstrap

LEVEL = 0.05
"""Largest p-value of the paired bootstrap over sentences that counts as a difference."""

GAINS = {"nll": "nats a token saved:", "chrf": "chrF gained:"}
"""The measures that decide."""

FEWEST_FOR_A_CLAIM = 300
"""Test pairs that each language needs for a verdict."""

Outcome = Literal["confirmed", "not confirmed", "undecided", "no runs"]

T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t, two-sided 95%, of 1 to 20 degrees of freedom; more degrees use the last value, an upper bound."""

WIDE, DEEP, LARGEST = MODELS[1], MODELS[2], MODELS[-1]


@dataclass(frozen=True)
class Difference:
    """The difference of two means, and its margin of error."""

    value: float
    margin: float | None
    """None if nothing has two seeds."""

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + (f" ± {self.margin:.2f}" if self.margin is not None else " (one seed)")

    @property
    def outcome(self) -> Outcome:
        """The verdict on the finding that the difference is above 0."""
        if self.margin is None or abs(self.value) <= self.margin:
            return "undecided"
        return "confirmed" if self.value > 0 else "not confirmed"


@dataclass(frozen=True)
class Verdict:
    """One finding of the paper and its verdict."""

    finding: str
    paper: str
    measured: str
    outcome: Outcome


def difference(more: Sequence[float], less: Sequence[float], spread: Iterable[Sequence[float]]) -> Difference | None:
    """Returns mean(more) - mean(less), values by seed, with the margin from all groups in ``spread``."""
    if not more or not less:
        return None
    groups = [group for group in spread if len(group) > 1]
    freedom = sum(len(group) - 1 for group in groups)
    value = statistics.fmean(more) - statistics.fmean(less)
    if not freedom:
        return Difference(value, None)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups)
    quantile = T95[min(freedom, len(T95)) - 1]
    return Difference(value, quantile * math.sqrt(squares / freedom * (1 / len(more) + 1 / len(less))))


def t_margin(values: Sequence[float]) -> float:
    """Returns the half-width of the 95% confidence interval of a mean, t * s / sqrt(n); 0 for one value."""
    if len(values) < 2:
        return 0.0
    return T95[min(len(values) - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Comparison:
    """Two models on some languages."""

    nll: Difference | None
    """Nats a token saved; None without runs of both."""
    chrf: Difference | None
    """chrF gained."""
    tests: Sequence[PairedTest]
    """Of the chrF difference over sentences, for each seed that both have."""
    seeds: int
    """Seeds that the sweep plans."""
    too_few: str = ""
    """Languages with too few test pairs."""

    @property
    def outcome(self) -> Outcome:
        """The verdict on the finding that the first is better."""
        if self.nll is None or self.chrf is None:
            return "no runs"
        by_sentences = len(self.tests) == self.seeds > 1 and all(
            test.p_value < LEVEL and test.gain * self.chrf.value > 0 for test in self.tests
        )
        outcomes = {self.nll.outcome, self.chrf.outcome}
        if not by_sentences or self.too_few:
            return "undecided"
        if outcomes == {"confirmed"}:
            return "confirmed"
        worse = "not confirmed" in outcomes and "confirmed" not in outcomes and self.chrf.value < 0
        return "not confirmed" if worse else "undecided"

    @property
    def sentences(self) -> str:
        """How many of the tests over sentences show a difference."""
        clear = sum(test.p_value < LEVEL for test in self.tests)
        few = f"; too few test pairs for a claim: {self.too_few}" if self.too_few else ""
        return f"over sentences p < {LEVEL} with {clear} of {self.seeds} seeds{few}"


def combined_outcome(comparisons: Sequence[Comparison]) -> Outcome:
    """Returns the verdict on a finding of several parts: confirmed if all are, not confirmed if one is not."""
    outcomes = {comparison.outcome for comparison in comparisons}
    if len(outcomes) == 1:
        return outcomes.pop()
    return "not confirmed" if "not confirmed" in outcomes else "undecided"


Lines = Callable[[int], list[str]]
"""Returns the lines of the run with a seed."""


def sentence_tests(seeds: Iterable[int], more: Lines, less: Lines, references: Lines) -> list[PairedTest]:
    """Tests the chrF difference between two models for each seed, by the paired bootstrap."""
    return [paired_bootstrap(more(seed), less(seed), references(seed), "chrf") for seed in seeds]


def depth_beats_width(results: Results) -> list[Verdict]:
    """The deep against the wide model of equal size, on low-resource languages."""
    finding = "at equal size depth beats width on low-resource languages"
    paper = "deep about +1.9 BLEU in the mean, large on low-resource languages, about equal on high-resource ones"
    return [_verdict(results, finding, paper, DEEP, WIDE, ("low",))]


def bigger_is_better(results: Results) -> list[Verdict]:
    """The middle model against the smallest, and the largest, where the scale has it, against the middle one, in every
    third."""
    middle = DEEP if DEEP in results.requested else WIDE
    findings = {
        (middle, SMALLEST): ("400M to 1.3B is better everywhere", "400M to 1.3B helps every language"),
        (LARGEST, middle): ("1.3B to 6B is better everywhere", "1.3B to 6B helps further, mostly high-resource ones"),
    }
    return [
        _verdict(results, finding, paper, more, less, THIRDS)
        for (more, less), (finding, paper) in findings.items()
        if more in results.requested
    ]


def beats_bilingual(results: Results) -> list[Verdict]:
    """Multilingual against tuned bilingual models on the low-resource third: the largest model, and one of the
    baselines' size."""
    paper = "6B beats the baselines on all languages, most on low-resource ones"
    verdicts = []
    for label, whose in ((LARGEST, "the largest"), (SMALLEST, "one of the baselines' own size")):
        if label in results.requested:
            finding = f"one multilingual model ({whose}, {label}) beats the bilingual ones on low-resource languages"
            planned = SWEEPS[results.scale].baselines
            verdicts.append(_verdict(results, finding, paper, label, BILINGUAL_MODELS, ("low",), planned))
    return verdicts


def _verdict(
    results: Results, finding: str, paper: str, more: str, less: str, deciding: Sequence[Third],
    among: Sequence[str] | None = None,
) -> Verdict:  # fmt: skip
    """Compares two labels in each third; ``deciding`` thirds decide."""
    by_third = {
        third: _comparison(results, more, less, results.in_third(third, among), third in deciding) for third in THIRDS
    }
    saved = _listed({third: found.nll for third, found in by_third.items()})
    gained = _listed({third: found.chrf for third, found in by_third.items()})
    tests = [f"{third} {by_third[third].sentences}" for third in deciding]
    better = _languages_better(results, more, less, among)
    parts = [f"{GAINS['nll']} {saved}", f"{GAINS['chrf']} {gained}", better, *tests]
    outcome = combined_outcome([by_third[third] for third in deciding])
    return Verdict(finding, paper, f"{more} against {less}: {'; '.join(parts)}", outcome)


def _comparison(results: Results, more: str, less: str, languages: Sequence[str], with_tests: bool) -> Comparison:
    if not languages:
        return Comparison(None, None, (), results.seeds)
    labels = [*results.multilingual_labels, *([BILINGUAL_MODELS] if BILINGUAL_MODELS in (more, less) else [])]

    def gain(metric: str) -> Difference | None:
        first, second = (results.means(label, languages, metric) for label in (more, less))
        if metric == "nll":  # less is better
            first, second = second, first
        return difference(first, second, [results.means(label, languages, metric) for label in labels])

    both = results.by_seed(more, languages, "chrf").keys() & results.by_seed(less, languages, "chrf").keys()
    tests = sentence_tests(
        sorted(both) if with_tests else (),
        lambda seed: results.lines(more, languages, seed, "hyp"),
        lambda seed: results.lines(less, languages, seed, "hyp"),
        lambda seed: results.lines(more, languages, seed, "ref"),
    )
    return Comparison(gain("nll"), gain("chrf"), tests, results.seeds, results.too_few(languages, FEWEST_FOR_A_CLAIM))


def _listed(by_third: dict[Third, Difference | None]) -> str:
    return ", ".join(f"{third} {difference or 'missing'}" for third, difference in by_third.items())


def _languages_better(results: Results, more: str, less: str, among: Sequence[str] | None) -> str:
    better = compared = 0
    for language in results.in_third(None, among):
        large, small = (results.means(label, [language], "chrf") for label in (more, less))
        if large and small:
            compared += 1
            better += statistics.fmean(large) > statistics.fmean(small)
    return f"higher chrF in {better} of {compared} languages"
