"""Compares the paper's findings with the measured results: confirmed, contradicted, or undecided, by one rule.

Two measures of the test pairs decide together, nats per token saved and chrF gained, and two kinds of chance: of the
seeds, and of the test pairs.

   |---- margin ----|---- margin ----|        margin = t(95%, f) * s * sqrt(1/a + 1/b)
  contradicted      0 undecided    confirmed  for the difference of means over a and b seeds

s is the standard deviation between seeds, pooled over all models compared (with two seeds a model, that of one model
alone is worth little), f its degrees of freedom: Student's test for two means at 95%. It covers the seeds' chance. For
that of the test pairs, a paired bootstrap of the chrF difference must have p < 0.05 with every seed, and the difference
the same sign with each. Neither covers the choice of languages. With one seed, with a seed of one model missing, or
with too few test pairs nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from experiments.base.hints import command
from experiments.sweeps.members.scales import MODELS, RULES, SMALLEST, baseline_label
from experiments.sweeps.report.margins import Difference, Outcome, difference
from experiments.sweeps.report.results import BILINGUAL_MODELS, CHRF, NLL, Metric, Results, Run, directions_of
from suite.errors import DataError
from suite.evaluation.bootstrap import PairedTest, TwoTranslations, paired_bootstrap
from suite.evaluation.scores import THIRDS, Third

LEVEL = 0.05
"""Largest p-value of the paired bootstrap over test pairs that counts as a difference."""

FEWEST_FOR_A_CLAIM = 300
"""Test pairs that a verdict needs, in all languages of the comparison together."""

WIDE, DEEP, LARGEST = MODELS[1], MODELS[2], MODELS[-1]


@dataclass(frozen=True)
class Comparison:
    """How much better one model is than another on some languages."""

    nll: Difference | None
    """Nats a token saved; None without runs of both."""
    chrf: Difference | None
    """chrF gained."""
    tests: Sequence[PairedTest]
    """Of the chrF difference over test pairs, for each seed that both have."""
    seeds: int
    """Seeds that the sweep plans."""
    pairs: int
    """Test pairs of all languages together."""

    @property
    def outcome(self) -> Outcome:
        """The verdict on the finding that the first is better."""
        if self.nll is None or self.chrf is None:
            return "no runs"
        if self.clear_seeds < self.seeds or self.seeds == 1 or self.pairs < FEWEST_FOR_A_CLAIM:
            return "undecided"
        outcomes = {self.nll.outcome, self.chrf.outcome}
        if outcomes == {"confirmed"}:
            return "confirmed"
        worse = "contradicted" in outcomes and "confirmed" not in outcomes and self.chrf.value < 0
        return "contradicted" if worse else "undecided"

    @property
    def clear_seeds(self) -> int:
        """The seeds for which the test pairs show a chrF difference of the same sign as the mean."""
        mean = self.chrf.value if self.chrf is not None else 0.0
        return sum(test.p_value < LEVEL and test.gain * mean > 0 for test in self.tests)


@dataclass(frozen=True)
class Verdict:
    """One finding of the paper and its verdict."""

    finding: str
    paper: str
    parts: tuple[tuple[str, Comparison], ...]
    """The comparisons by what they are about, such as a third of the languages."""
    outcome: Outcome


def compare(
    results: Results,
    more: str,
    less: str,
    languages: Sequence[str],
    labels: Collection[str],
    into_english: bool | None = None,
    with_tests: bool = True,
) -> Comparison:
    """Compares two labels on some languages, in both directions or one. The margins are from the seeds of all
    ``labels``.

    Raises DataError if the two were scored on different test pairs.
    """

    def gain(metric: Metric) -> Difference | None:
        metric = replace(metric, into_english=into_english)
        means = {label: results.means(label, languages, metric) for label in (more, less, *labels)}
        better, worse = (less, more) if metric.name == NLL.name else (more, less)
        return difference(means[better], means[worse], [means[label] for label in labels])

    first, second = (results.model_of(label, languages) for label in (more, less))
    chrf = replace(CHRF, into_english=into_english)
    scored = results.by_seed(more, languages, chrf).keys() & results.by_seed(less, languages, chrf).keys()
    tests = []
    for seed in sorted(scored) if with_tests else ():
        texts = [  # a tuple a language, one entry a direction
            tuple(_two_translations(one, other, name) for name in directions_of(language, into_english))
            for one, other, language in zip(first[seed], second[seed], languages, strict=True)
        ]
        tests.append(paired_bootstrap(tuple(texts)))
    planned = {member.experiment.train.seed for member in results.members}
    pairs = sum(results.test_pairs(language) for language in languages)
    return Comparison(gain(NLL), gain(CHRF), tests, len(planned), pairs)


def _two_translations(one: Run, other: Run, direction: str) -> TwoTranslations:
    references = one.lines(direction, "ref")
    if other.lines(direction, "ref") != references:
        raise DataError(
            f"{one.folder} and {other.folder} were scored on different test pairs of {direction}; score one of them "
            f"again with {command('score')}"
        )
    return TwoTranslations(one.lines(direction, "hyp"), other.lines(direction, "hyp"), references)


def combined_outcome(comparisons: Sequence[Comparison]) -> Outcome:
    """Returns the verdict on a finding of several parts: confirmed if all are, contradicted if one is."""
    outcomes = {comparison.outcome for comparison in comparisons}
    if len(outcomes) == 1:
        return outcomes.pop()
    return "contradicted" if "contradicted" in outcomes else "undecided"


@dataclass(frozen=True)
class Finding:
    """A finding of the paper on the multilingual models: one model is better than another in some thirds."""

    more: str
    less: str
    sentence: str
    paper: str
    deciding: Sequence[Third] = THIRDS
    """Thirds of the languages that decide; the others are shown."""

    def verdict(self, results: Results) -> Verdict:
        """Bilingual models are compared in the languages for which the sweep plans them."""
        among, labels = None, results.multilingual_labels
        if self.less == BILINGUAL_MODELS:
            among, labels = RULES[results.scale].baselines, [*labels, BILINGUAL_MODELS]
        parts, that_decide = [], []
        for third in THIRDS:
            languages, decides = results.in_third(third, among), third in self.deciding
            found = compare(results, self.more, self.less, languages, labels, with_tests=decides)
            if languages:
                parts.append((f"{third}: {', '.join(languages)}", found))
            if decides:
                that_decide.append(found)
        sentence = f"{self.sentence}: {self.more} against {self.less}"
        return Verdict(sentence, self.paper, tuple(parts), combined_outcome(that_decide))


_DEPTH = "deep about +1.9 BLEU in the mean, large on low-resource languages, about equal on high-resource ones"
_MIDDLE = "400M to 1.3B helps every language"
_LARGE = "1.3B to 6B helps further, mostly high-resource ones"
_BILINGUAL = "6B beats the baselines on all languages, most on low-resource ones"
_BEATS = "beats the bilingual ones on low-resource languages"

DEPTH_BEATS_WIDTH = Finding(DEEP, WIDE, "at equal size depth beats width on low-resource languages", _DEPTH, ("low",))
BIGGER_IS_BETTER = (
    Finding(WIDE, SMALLEST, "400M to 1.3B (wide) is better everywhere", _MIDDLE),
    Finding(DEEP, SMALLEST, "400M to 1.3B (deep) is better everywhere", _MIDDLE),
    Finding(LARGEST, WIDE, "1.3B (wide) to 6B is better everywhere", _LARGE),
)
BEATS_BILINGUAL = tuple(
    Finding(more, BILINGUAL_MODELS, f"one multilingual model ({which}, {more}) {_BEATS}", _BILINGUAL, ("low",))
    for more, which in ((LARGEST, "the largest"), (SMALLEST, "one of the baselines' own size"))
)


def verdicts_on(*findings: Finding) -> Callable[[Results], list[Verdict]]:
    """Returns what judges those findings whose better model the sweep has."""

    def judge(results: Results) -> list[Verdict]:
        labels = {member.label for member in results.members}
        return [finding.verdict(results) for finding in findings if finding.more in labels]

    return judge


def above_baseline(results: Results, label: str, language: str) -> Difference | None:
    """Returns the chrF of a label above the bilingual baseline in a language, the margin from all models in it; None
    without scores of both."""
    alone = results.means(baseline_label(language), [language], CHRF)
    models = {name: results.means(name, [language], CHRF) for name in results.multilingual_labels}
    return difference(models[label], alone, [alone, *models.values()])
