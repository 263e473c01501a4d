"""Tuning of bilingual baselines: a few settings are trained with seed 0, and the one that validates best is used.

    seed 0   dropout 0.1   dropout 0.3   half the rate   a quarter of the rate   half the size     never scored
                                              best                                                  then every seed

A multilingual model that beats an untuned baseline proves little: on few pairs a baseline overfits at the setting that
suits the multilingual model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member, read_record
from experiments.translation.scales import TextRule


@dataclass(frozen=True)
class Setting:
    """A setting of a bilingual baseline to try."""

    name: str
    dropout: float
    rate: float = 1.0
    """Times the rule's learning rate."""
    size: float = 1.0
    """Times the rule's width and layers."""

    @property
    def folder_name(self) -> str:
        return self.name.replace(", ", "-").replace(" ", "-")

    def applied(self, rule: TextRule) -> TextRule:
        return replace(
            rule,
            dropout=self.dropout,
            learning_rate=rule.learning_rate * self.rate,
            layers_by=rule.layers_by / self.size,
            width_by=round(rule.width_by / self.size),
            feed_forward_by=round(rule.feed_forward_by / self.size),
            heads_by=round(rule.heads_by / self.size),
        )


SETTINGS = (
    Setting("dropout 0.1", 0.1),
    Setting("dropout 0.3", 0.3),
    Setting("dropout 0.3, half the rate", 0.3, rate=0.5),
    Setting("dropout 0.3, a quarter of the rate", 0.3, rate=0.25),
    Setting("dropout 0.3, half the size", 0.3, size=0.5),
)
"""What a bilingual baseline is tuned over. The multilingual models of a sweep have one untuned setting."""

BaselineRuns = Callable[[Setting, int], Member]
"""Returns the bilingual run of a setting and a seed."""


def tuning_members(alone: BaselineRuns) -> list[Member]:
    """Returns a run for each setting, with seed 0. No test pair is read: they are not scored. They run first, because
    the choice depends on them."""
    return [
        replace(member, label=f"{member.label}, {setting.name}", scoring=None, priority=1)
        for setting in SETTINGS
        for member in [alone(setting, 0)]
    ]


def tuned_members(alone: BaselineRuns, seeds: int, runs: Path) -> list[Member]:
    """Returns the runs of the setting that validated best, with every seed; none before all settings are trained."""
    setting = best_setting(alone, runs)
    return [alone(setting, seed) for seed in range(seeds)] if setting is not None else []


def best_setting(alone: BaselineRuns, runs: Path) -> Setting | None:
    """Returns the setting with the best validation; None until all are trained, and if no validation was finite."""
    found = []
    for setting, member in zip(SETTINGS, tuning_members(alone), strict=True):
        record = read_record(runs / member.folder)
        if record is None or not member.experiment.is_finished(record):
            return None
        if record["best_valid_nll"] is not None:
            found.append((float(record["best_valid_nll"]), setting))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def tuning_table(tuned: Sequence[tuple[str, BaselineRuns]], runs: Path) -> Table:
    """Returns a row for each setting of each baseline, given its title and its runs."""
    rows: list[list[Value]] = []
    for title, alone in tuned:
        chosen = best_setting(alone, runs)
        for setting, member in zip(SETTINGS, tuning_members(alone), strict=True):
            record = read_record(runs / member.folder) or {}
            best = record.get("best_valid_nll"), record.get("best_step"), record.get("steps")
            rows.append([title, setting.name, *best, _choice(setting, member, record) if setting == chosen else ""])
    headings = ("baseline", "setting", "best validation NLL", "at step", "steps in all", "")
    notes = [
        "Measured on validation text, with seed 0; no test pair was read. Where the chosen setting has the lowest rate "
        "tried, or was best at its last step, a lower rate or more steps could improve the baseline further."
    ]
    return Table("tuning", "Tuning of the bilingual models", headings, rows, notes)


def _choice(setting: Setting, member: Member, record: dict[str, Any]) -> str:
    """Returns ``chosen``, and whether the setting is the lowest rate tried or was best at its last step."""
    lowest = setting.rate == min(each.rate for each in SETTINGS)
    last = record.get("best_step") == member.experiment.train.steps
    return ", ".join(["chosen", *["lowest rate"] * lowest, *["last step"] * last])
