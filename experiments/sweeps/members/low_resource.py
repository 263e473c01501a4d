"""Members of the sweep ``low_resource``: one language with few pairs, alone, with relatives, with unrelated languages.

    tuning    alone, four settings, seed 0      chosen by validation, never by test pairs; not scored
    then      alone, the chosen setting         every seed
              with relatives                    every seed, each temperature T
              with unrelated languages          every seed: as many pairs, as much English, no relative

Every run trains until its validations stop improving, and its best checkpoint is scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.scaling.scales import TextRule, shrunk_by
from experiments.sweeps.members.base import Member, Scoring, folder_name
from experiments.sweeps.report.results import read_record
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.runs import t12_400m

NAME = "low_resource"


@dataclass(frozen=True)
class Group:
    """A language with few pairs, and what it is trained with."""

    language: str
    relatives: tuple[str, ...]
    unrelated: tuple[str, ...]
    pairs: int
    """Pairs of each relative and of each unrelated language: equal, so that only relatedness differs."""

    @property
    def languages(self) -> tuple[str, ...]:
        """All of them: the text that the vocabulary is learned from."""
        return tuple(sorted({self.language, *self.relatives, *self.unrelated}))


@dataclass(frozen=True)
class Setting:
    """A setting of the bilingual baseline to try."""

    name: str
    dropout: float
    rate: float = 1.0
    """Times the rule's learning rate."""
    size: float = 1.0
    """Times the rule's width and layers."""


SETTINGS = (
    Setting("dropout 0.1", 0.1),
    Setting("dropout 0.3", 0.3),
    Setting("dropout 0.3, half the rate", 0.3, rate=0.5),
    Setting("dropout 0.3, half the width", 0.3, size=0.5),
)
"""What a bilingual baseline is tuned over. The multilingual models are not tuned."""


@dataclass(frozen=True)
class LowResourceRule:
    """The sweep at one scale."""

    text: TextRule
    groups: tuple[Group, ...]
    counts: tuple[int | None, ...]
    """Training pairs of the language; None: all of them."""
    temperatures: tuple[float, ...]
    seeds: int
    validate_every: int
    patience: int
    scoring: Scoring


GALICIAN = Group("gl", ("es", "pt_BR"), ("fi", "hu"), 15_000)
BELARUSIAN = Group("be", ("ru", "uk"), ("fi", "hu"), 13_500)

_LAPTOP = TextRule(
    layers_by=2, width_by=8, feed_forward_by=16, heads_by=4, vocabulary_by=16, max_length=24, micro_batches=1,
    batch_tokens=1024, steps=800, checkpoint_every=400, valid_pairs=1000, dropout=0.1, learning_rate=4e-3,
    warmup_steps=100, threads=1,
)  # fmt: skip
_TINY = TextRule(
    layers_by=6, width_by=64, feed_forward_by=512, heads_by=8, head_width_by=8, vocabulary_by=64, corpus="django", max_length=16,
    micro_batches=1, batch_tokens=64, steps=6, checkpoint_every=3, valid_pairs=16, dropout=0.1, warmup_steps=2,
    threads=1,
)  # fmt: skip

RULES = {
    "laptop": LowResourceRule(
        _LAPTOP, (GALICIAN,), (500, 2000), (5.0,), seeds=3, validate_every=40, patience=3,
        scoring=Scoring(4, 300),
    ),
    "laptop_all": LowResourceRule(
        replace(_LAPTOP, steps=2000), (GALICIAN, BELARUSIAN), (500, 2000, None), (1.0, 2.0, 5.0), seeds=3,
        validate_every=40, patience=4, scoring=Scoring(4, 300),
    ),
    # a test of the whole sweep in two minutes; the models learn nothing
    "tiny": LowResourceRule(
        _TINY, (Group("nl", ("de",), ("es",), 300),), (50, None), (5.0,), seeds=2, validate_every=2, patience=1,
        scoring=Scoring(1, 3),
    ),
}  # fmt: skip
"""The sweep by scale. ``laptop`` fits an hour on two cores; ``laptop_all`` takes a day."""


def low_resource_members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    """Returns the tuning runs and the multilingual ones, and after tuning also the bilingual ones: they depend on it.

    They are ordered by seed, so that an interrupted sweep has runs to compare.
    """
    rule = RULES[scale]
    cases = [(group, count) for group in rule.groups for count in rule.counts]
    members = [member for case in cases for member in tuning(*case, scale, cluster)]
    chosen = {case: chosen_setting(*case, scale, cluster, runs) for case in cases}
    for seed in range(rule.seeds):
        for case in cases:
            if (setting := chosen[case]) is not None:
                members.append(alone(*case, setting, seed, scale, cluster))
            members += _multilingual(*case, seed, scale, cluster)
    return list({member.folder: member for member in members}.values())


def tuning(group: Group, count: int | None, scale: str, cluster: Cluster) -> list[Member]:
    """Returns a bilingual run for each setting, with seed 0. No test pair is read: they are not scored."""
    members = [alone(group, count, setting, 0, scale, cluster) for setting in SETTINGS]
    return [
        replace(member, label=f"{member.label}, {setting.name}", scoring=None, priority=1)
        for member, setting in zip(members, SETTINGS, strict=True)
    ]


def chosen_setting(group: Group, count: int | None, scale: str, cluster: Cluster, runs: Path) -> Setting | None:
    """Returns the setting with the best validation; None until all are trained."""
    found = []
    for setting, member in zip(SETTINGS, tuning(group, count, scale, cluster), strict=True):
        record = read_record(runs / member.folder)
        if record is None or not member.experiment.is_finished(record):
            return None
        found.append((float(record["best_valid_nll"]), setting))
    return min(found, key=lambda entry: entry[0])[1]


def alone(group: Group, count: int | None, setting: Setting, seed: int, scale: str, cluster: Cluster) -> Member:
    """Returns a bilingual run of the language."""
    rule = RULES[scale]
    text = replace(
        rule.text, dropout=setting.dropout, learning_rate=rule.text.learning_rate * setting.rate,
        layers_by=rule.text.layers_by / setting.size, width_by=round(rule.text.width_by / setting.size),
        feed_forward_by=round(rule.text.feed_forward_by / setting.size),
        heads_by=round(rule.text.heads_by / setting.size),
    )  # fmt: skip
    run = _run(rule, text, group, (group.language,), count, seed, cluster, scale)
    name = f"{group.language}-{_amount(count)}-alone-{setting.name.replace(', ', '-').replace(' ', '-')}-{seed}"
    return Member(_folder(scale, name), alone_label(group, count), run, _scoring(rule, group))


def _multilingual(group: Group, count: int | None, seed: int, scale: str, cluster: Cluster) -> Iterator[Member]:
    rule = RULES[scale]
    for others, temperatures in ((group.relatives, rule.temperatures), (group.unrelated, rule.temperatures[-1:])):
        for temperature in temperatures:
            run = _run(rule, rule.text, group, (group.language, *others), count, seed, cluster, scale)
            run = run.model_copy(update={"text": run.text.model_copy(update={"temperature": temperature})})
            name = f"{group.language}-{_amount(count)}-with-{'-'.join(others)}-T{temperature:g}-{seed}"
            yield Member(
                _folder(scale, name), with_label(group, others, count, temperature), run, _scoring(rule, group)
            )


def alone_label(group: Group, count: int | None) -> str:
    """Returns the label of the tuned bilingual runs."""
    return f"{group.language} alone, {_amount(count)} pairs"


def with_label(group: Group, others: tuple[str, ...], count: int | None, temperature: float) -> str:
    """Returns the label of the runs with other languages."""
    return f"{group.language} with {', '.join(others)}, T = {temperature:g}, {_amount(count)} pairs"


def _run(
    rule: LowResourceRule, text: TextRule, group: Group, languages: tuple[str, ...], count: int | None, seed: int,
    cluster: Cluster, scale: str,
) -> TranslationExperiment:  # fmt: skip
    run = shrunk_by(t12_400m(), text, cluster, scale)
    limits = [f"{group.language}:{count}"] if count is not None else []
    limits += [f"{other}:{group.pairs}" for other in languages[1:]]
    chosen = {
        "corpus_languages": group.languages,
        "languages": tuple(sorted(languages)),
        "train_pairs": tuple(limits) or None,
    }
    train = {"seed": seed, "validate_every": rule.validate_every, "patience": rule.patience}
    return run.model_copy(
        update={"text": run.text.model_copy(update=chosen), "train": run.train.model_copy(update=train)}
    )


def _scoring(rule: LowResourceRule, group: Group) -> Scoring:
    return replace(rule.scoring, languages=(group.language,))


def _folder(scale: str, name: str) -> str:
    return f"{folder_name(NAME, scale)}/{name}"


def _amount(count: int | None) -> str:
    return "all" if count is None else str(count)
