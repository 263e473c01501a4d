"""Compares the paper's findings with the measured results: confirmed, not confirmed, or undecided, by one rule.

    |---- margin ----|---- margin ----|        margin = t(95%, f) * s * sqrt(1/a + 1/b)
  not confirmed    0 undecided     confirmed   for the difference of means over a and b seeds

s is the standard deviation between seeds, pooled over all models of the sweep (with two seeds a model, that of one
model alone is worth little), f its degrees of freedom: Student's test for two means at 95%. It covers the seeds'
chance, not that of the test sentences or of the choice of languages. With one seed there is no spread and nothing is
decided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.sweeps.members.multilingual import MODELS, SMALLEST
from experiments.sweeps.report.results import THIRDS, Results, Third

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


def depth_beats_width(results: Results) -> list[Verdict]:
    """The deep against the wide model of equal size, on low-resource languages."""
    differences = {third: _models(results, DEEP, WIDE, third) for third in THIRDS}
    return [
        Verdict(
            "at equal size depth beats width on low-resource languages",
            "deep about +1.9 BLEU in the mean, large on low-resource languages, about equal on high-resource ones",
            _by_third(differences, "deep - wide"),
            combined_outcome([differences["low"]]),
        )
    ]


def bigger_is_better(results: Results) -> list[Verdict]:
    """The middle model against the smallest, and the largest against the middle one, in every third."""
    middle = DEEP if DEEP in results.requested else WIDE
    findings = {
        (middle, SMALLEST): ("400M to 1.3B is better everywhere", "400M to 1.3B helps every language"),
        (LARGEST, middle): ("1.3B to 6B is better everywhere", "1.3B to 6B helps further, mostly high-resource ones"),
    }
    verdicts = []
    for (more, less), (finding, paper) in findings.items():
        differences = {third: _models(results, more, less, third) for third in THIRDS}
        measured = f"{_by_third(differences, f'{more} - {less}')}; better in {_languages_better(results, more, less)}"
        verdicts.append(Verdict(finding, paper, measured, combined_outcome(list(differences.values()))))
    return verdicts


def beats_bilingual(results: Results) -> list[Verdict]:
    """Multilingual against bilingual on the low-resource third: the largest model, and one of the baselines' size."""
    verdicts = []
    for label, whose in ((LARGEST, "the largest"), (SMALLEST, "one of the baselines' own size")):
        if label not in results.requested:
            continue
        differences = {}
        for third in THIRDS:
            languages = results.in_third(third, results.baselines)
            bilingual = results.bilingual_means(languages)
            groups = [*(results.means(other, languages) for other in results.multilingual_labels), bilingual]
            differences[third] = difference(results.means(label, languages), bilingual, groups)
        verdicts.append(
            Verdict(
                f"one multilingual model ({whose}, {label}) beats the bilingual ones on low-resource languages",
                "6B beats the baselines on all languages, most on low-resource ones",
                _by_third(differences, "multilingual - bilingual"),
                combined_outcome([differences["low"]]),
            )
        )
    return verdicts


def _models(results: Results, more: str, less: str, third: Third) -> Difference | None:
    languages = results.in_third(third)
    if not languages:
        return None
    groups = [results.means(label, languages) for label in results.multilingual_labels]
    return difference(results.means(more, languages), results.means(less, languages), groups)


def combined_outcome(differences: Sequence[Difference | None]) -> Outcome:
    """Returns the verdict on a finding of several parts: confirmed if all are, not confirmed if one is not."""
    present = [difference for difference in differences if difference is not None]
    if not present:
        return "no runs"
    outcomes = {difference.outcome for difference in present}
    if "not confirmed" in outcomes:
        return "not confirmed"
    return "confirmed" if outcomes == {"confirmed"} and len(present) == len(differences) else "undecided"


def _by_third(differences: dict[Third, Difference | None], what: str) -> str:
    parts = [f"{third} {difference or 'missing'}" for third, difference in differences.items()]
    return f"{what}, BLEU: {', '.join(parts)}"


def _languages_better(results: Results, more: str, less: str) -> str:
    better = compared = 0
    for language in results.languages:
        large, small = (results.means(label, [language]) for label in (more, less))
        if large and small:
            compared += 1
            better += statistics.fmean(large) > statistics.fmean(small)
    return f"{better} of {compared} languages"
