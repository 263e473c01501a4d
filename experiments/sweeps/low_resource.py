"""Transfer to a low-resource language: alone, with relatives, with unrelated languages, by its number of pairs.

This is the paper's claim that one multilingual model beats bilingual ones on low-resource languages (section 5, figure
6), tested with a rule for the budget that favours neither (docs/sweeps.md): every run trains until its validations stop
improving, and its best checkpoint is scored.

    alone, tuned (``members/tuning.py``)    every seed
    with relatives                          every seed
    with unrelated languages                every seed: as many pairs, as much English; not at scale laptop_long
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.sweeps.members.base import Member, Scoring, folder_name
from experiments.sweeps.members.tuning import SETTINGS, Baseline, Setting
from experiments.sweeps.report.results import Results
from experiments.sweeps.report.score_tables import Group
from experiments.sweeps.report.verdicts import Verdict, compare
from experiments.sweeps.text_base import text_sweep
from experiments.translation.runs import t12_400m
from experiments.translation.scales import TextRule, shrunk_by

NAME, ALONE = "low_resource", "alone, tuned"

PAPER = "one multilingual model beats bilingual ones, most on low-resource languages"


@dataclass(frozen=True)
class LowResourceRule:
    text: TextRule
    language: str
    """The one with few pairs."""
    relatives: tuple[str, ...]
    unrelated: tuple[str, ...]
    """Languages of the control; empty: there is none."""
    pairs: int
    """Pairs of each relative and of each unrelated language: equal, so that only relatedness differs."""
    counts: tuple[int | None, ...]
    """Training pairs of the language; None: all of them."""
    validate_every: int
    patience: int
    scoring: Scoring
    seeds: int = 3


@dataclass(frozen=True)
class Case:
    """The language of a scale cut to a number of pairs (None: all), and the models that are compared on it."""

    scale: str
    count: int | None

    @property
    def rule(self) -> LowResourceRule:
        return RULES[self.scale]

    @property
    def title(self) -> str:
        return f"{self.rule.language}, {self.amount} pairs"

    @property
    def amount(self) -> str:
        return "all" if self.count is None else str(self.count)

    @property
    def models(self) -> dict[str, tuple[str, ...]]:
        """The other languages of each model: the tuned bilingual one first, the control last."""
        relatives, unrelated = self.rule.relatives, self.rule.unrelated
        control = {f"with {', '.join(unrelated)} (unrelated)": unrelated} if unrelated else {}
        return {ALONE: (), f"with {', '.join(relatives)}": relatives, **control}

    @property
    def labels(self) -> list[str]:
        """The models' labels in the sweep."""
        return [self.label(model) for model in self.models]

    def label(self, model: str) -> str:
        return f"{self.title}: {model}"


_LAPTOP = TextRule(
    blocks_by=2, width_by=8, feed_forward_by=16, heads_by=4, vocabulary_by=16, max_length=24, micro_batches=1,
    batch_tokens=1024, steps=720, checkpoint_every=240, valid_pairs=1400, dropout=0.1, learning_rate=8e-3,
    warmup_steps=100, threads=1,
)  # fmt: skip
_TINY = TextRule(
    blocks_by=6, width_by=64, feed_forward_by=512, heads_by=8, head_width_by=8, vocabulary_by=64, corpus="django",
    max_length=16, micro_batches=1, batch_tokens=64, steps=6, checkpoint_every=3, valid_pairs=16, dropout=0.1,
    warmup_steps=2, threads=1,
)  # fmt: skip

_GALICIAN = LowResourceRule(
    _LAPTOP,
    language="gl",
    relatives=("es", "pt_BR"),
    unrelated=("fi", "hu"),
    pairs=15_000,
    counts=(500, 2000),
    validate_every=40,
    patience=3,
    scoring=Scoring(4, 300),
)

RULES = {
    "laptop": _GALICIAN,
    "laptop_slavic": replace(_GALICIAN, language="be", relatives=("ru", "uk"), pairs=13_500),
    "laptop_long": replace(
        _GALICIAN, text=replace(_LAPTOP, steps=2160, checkpoint_every=720), unrelated=(), counts=(2000,),
        validate_every=80, patience=4,
    ),
    # a test of the whole sweep; the models learn nothing
    "tiny": LowResourceRule(
        _TINY, "nl", ("de",), ("es",), 300, (50, None), validate_every=2, patience=1, scoring=Scoring(1, 3), seeds=2
    ),
}  # fmt: skip
"""The sweep by scale. ``laptop``, ``laptop_slavic`` and ``laptop_long`` are meant for an hour each on two cores.
``laptop_long`` trains the multilingual model with 2,000 pairs three times as long, without the control. The models have
one stage, so one micro-batch is the fastest. The validation sample has all pairs of the low-resource language, whatever
the other languages are."""


def cases(scale: str) -> list[Case]:
    return [Case(scale, count) for count in RULES[scale].counts]


def low_resource_members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    """Returns the tuning runs and the multilingual ones, and after tuning also the bilingual ones: they depend on it.

    They are ordered by number of pairs, then by seed, so that an interrupted sweep has runs to compare.
    """
    members = []
    for case in cases(scale):
        baseline = alone(case, cluster)
        members += baseline.tuning()
        tuned = baseline.tuned(case.rule.seeds, runs)
        for seed in range(case.rule.seeds):
            members += tuned[seed : seed + 1]
            members += [_member(case, model, seed, cluster) for model in case.models if model != ALONE]
    return list({member.folder: member for member in members}.values())


def alone(case: Case, cluster: Cluster) -> Baseline:
    return Baseline(case.title, lambda setting, seed: _member(case, ALONE, seed, cluster, setting))


def _member(case: Case, model: str, seed: int, cluster: Cluster, setting: Setting | None = None) -> Member:
    rule, others = case.rule, case.models[model]
    text = rule.text if setting is None else setting.applied(rule.text)
    name = f"with-{'-'.join(others)}" if setting is None else f"alone-{setting.folder_name}"
    languages = sorted({rule.language, *rule.relatives, *rule.unrelated})  # the vocabulary is learned from all
    limits = [f"{rule.language}:{case.count}"] if case.count is not None else []
    limits += [f"{other}:{rule.pairs}" for other in others]
    run = shrunk_by(t12_400m(), text, cluster, case.scale).with_settings(
        f"text.corpus_languages={','.join(languages)} "
        f"text.languages={','.join(sorted((rule.language, *others)))} "
        f"text.train_pairs={','.join(limits) or 'none'} "
        f"train.seed={seed} train.validate_every={rule.validate_every} train.patience={rule.patience}"
    )
    folder = f"{folder_name(NAME, case.scale)}/{rule.language}-{case.amount}-{name}-{seed}"
    return Member(folder, case.label(model), run, replace(rule.scoring, languages=(rule.language,)))


def verdicts(results: Results) -> list[Verdict]:
    """Relatives against the tuned bilingual model, and against as many pairs of unrelated languages, if any."""
    found = []
    for case in cases(results.scale):
        language, (alone, relatives, *control) = case.rule.language, case.labels
        others = [(alone, "beats the tuned bilingual model", PAPER)]
        others += [(other, "beats one with unrelated languages", "the paper does not test this") for other in control]
        for other, what, paper in others:
            compared = compare(results, relatives, other, [language], case.labels)
            finding = f"{case.title}: the multilingual model {what}"
            found.append(Verdict(finding, paper, ((language, compared),), compared.outcome))
    return found


def groups(results: Results) -> list[Group]:
    """Returns the models of each case."""
    return [
        Group(case.title, [(model, case.label(model), [case.rule.language]) for model in case.models])
        for case in cases(results.scale)
    ]


def _about(results: Results) -> list[str]:
    rule = RULES[results.scale]
    control = f"or with {', '.join(rule.unrelated)}, " if rule.unrelated else ""
    counts = ", ".join("all" if count is None else str(count) for count in rule.counts)
    return [
        f"One language cut to {counts} training pairs, drawn anew for each of {rule.seeds} seeds: {rule.language} "
        f"with its relatives {', '.join(rule.relatives)}, {control}{rule.pairs:,} pairs of each. Both "
        "directions are trained. All models of a language have one vocabulary, one split and one test text.",
        f"Every run validates every {rule.validate_every} steps and ends after {rule.patience} validations without "
        f"improvement, or after {rule.text.steps:,} steps of {rule.text.batch_tokens:,} tokens. Its best checkpoint is "
        f"scored. The bilingual models are tuned over {len(SETTINGS)} settings on validation text with seed 0; only "
        "the chosen one is scored. The multilingual models are not tuned.",
    ]


SWEEP = text_sweep(
    NAME,
    "Transfer to a low-resource language",
    _about,
    low_resource_members,
    verdicts,
    groups,
    tuned=lambda scale, cluster: [alone(case, cluster) for case in cases(scale)],
    scales=tuple(RULES),
)
