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
            blocks_by=rule.blocks_by / self.size,
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


@dataclass(frozen=True)
class Baseline:
    """A bilingual model that is tuned."""

    title: str
    run: Callable[[Setting, int], Member]
    """Returns its run with a setting and a seed."""

    def tuning(self) -> list[Member]:
        """Returns a run for each setting, with seed 0. No test pair is read: they are not scored. They run first,
        because the choice depends on them."""
        found = [(setting, self.run(setting, 0)) for setting in SETTINGS]
        return [replace(run, label=f"{run.label}, {setting.name}", scoring=None, priority=1) for setting, run in found]

    def tuned(self, seeds: int, runs: Path) -> list[Member]:
        """Returns the runs of the chosen setting, with every seed; none before all settings are trained."""
        setting = self.chosen(runs)
        return [self.run(setting, seed) for seed in range(seeds)] if setting is not None else []

    def chosen(self, runs: Path) -> Setting | None:
        """Returns the setting that validated best; None until all are trained, and if no validation was finite."""
        found = []
        for setting, member in zip(SETTINGS, self.tuning(), strict=True):
            record = read_record(runs / member.folder)
            if record is None or not member.experiment.is_finished(record):
                return None
            if record.get("best_valid_nll") is not None:
                found.append((float(record["best_valid_nll"]), setting))
        return min(found, key=lambda entry: entry[0])[1] if found else None


def tuning_table(baselines: Sequence[Baseline], runs: Path) -> Table:
    """Returns a row for each setting of each baseline."""
    lowest_rate = min(setting.rate for setting in SETTINGS)
    rows: list[list[Value]] = []
    for baseline in baselines:
        chosen = baseline.chosen(runs)
        for setting, member in zip(SETTINGS, baseline.tuning(), strict=True):
            record = read_record(runs / member.folder) or {}
            best_step, choice = record.get("best_step"), ""
            if setting == chosen:
                choice = "chosen"
                choice += ", lowest rate" if setting.rate == lowest_rate else ""
                choice += ", last step" if best_step == member.experiment.train.steps else ""
            best_nll, steps = record.get("best_valid_nll"), record.get("steps")
            rows.append([baseline.title, setting.name, best_nll, best_step, steps, choice])
    headings = ("baseline", "setting", "best validation NLL", "at step", "steps in all", "")
    notes = [
        "Measured on validation text, with seed 0; no test pair was read. Where the chosen setting has the lowest rate "
        "tried, or was best at its last step, a lower rate or more steps could improve the baseline further."
    ]
    return Table("tuning", "Tuning of the bilingual models", headings, rows, notes)
