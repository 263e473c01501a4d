"""The report of a sweep of your own: a row and a curve for each label, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.report.page import Page, Section
from experiments.report.table import Table, Value, readable
from experiments.sweeps.members.base import Member, read_record
from experiments.sweeps.report.figures import step_curves
from experiments.sweeps.report.verdicts import t_margin
from suite.training.metrics import LOSS, STEP, read_steps


@dataclass(frozen=True)
class FinishedMember:
    """A member, its record, and the loss of each step."""

    member: Member
    record: dict[str, Any]
    losses: tuple[tuple[int, float], ...]


def label_page(title: str, about: Sequence[str], members: Sequence[Member], runs: Path) -> Page:
    """Returns the report of the finished members: what is missing, a table by label, the loss curves, all runs."""
    finished = _finished(members, runs)
    folders = {run.member.folder for run in finished}
    missing = [member.folder for member in members if member.folder not in folders]
    what = [f"{len(finished)} of {len(members)} runs are finished."]
    what += [f"Not finished, and excluded from all numbers: {', '.join(missing)}."] if missing else []
    curves = step_curves([(run.member.label, run.losses) for run in finished])
    return Page(
        title,
        [
            Section("What was compared", [*about, *what]),
            Section("Results", tables=[_by_label(finished, members)]),
            Section("Losses", pictures=[curves] if curves else []),
            Section("Runs", tables=[_runs(finished)]),
        ],
    )


def label_table(members: Sequence[Member], runs: Path) -> Table:
    """Returns a row for each label."""
    return _by_label(_finished(members, runs), members)


def mean_and_margin(values: Sequence[float]) -> str | None:
    """Returns ``mean ± margin``: the 95% confidence interval of the mean, t * s / sqrt(n); only the mean of one value,
    None for none."""
    if not values:
        return None
    mean = readable(float(statistics.fmean(values)))
    if len(values) == 1:
        return mean
    return f"{mean} ± {t_margin(values):.2g}"


def _finished(members: Sequence[Member], runs: Path) -> list[FinishedMember]:
    found = []
    for member in members:
        record = read_record(runs / member.folder)
        if record is None or not member.experiment.is_finished(record):
            continue
        steps = read_steps(runs / member.folder / "metrics.jsonl")
        losses = tuple((int(step[STEP]), float(step[LOSS])) for step in steps if step[LOSS] is not None)
        found.append(FinishedMember(member, record, losses))
    return found


def _by_label(finished: Sequence[FinishedMember], members: Sequence[Member]) -> Table:
    headings = (
        "run", "measure", "held-out mean", "seeds", "last training loss", "steps", "per second", "parameters"
    )  # fmt: skip
    rows: list[list[Value]] = []
    for label in dict.fromkeys(member.label for member in members):
        records = [run.record for run in finished if run.member.label == label]
        if not records:
            rows.append([label, None, None, 0, *[None] * 4])
            continue
        first = records[0]
        unit, measure = first["unit"], first["measure"]
        scores = [float(record[key]) for record in records if (key := f"valid_{measure}") in record]
        losses = [float(record["loss_last"]) for record in records if record["loss_last"] is not None]
        speed = statistics.fmean(record[f"{unit}_per_second"] for record in records)
        rows.append(
            [
                label, measure if scores else None, mean_and_margin(scores), len(records),
                mean_and_margin(losses), first["steps"],
                f"{readable(float(speed))} {unit}", first["parameters"],
            ]
        )  # fmt: skip
    notes = [
        "Measured. ± is the 95% confidence interval of the mean over seeds (Student's t). It covers the seeds' chance, "
        "not that of the held-out data. Speeds are of members that may have run side by side."
    ]
    return Table("by-label", "Runs by label", headings, rows, notes)


def _runs(finished: Sequence[FinishedMember]) -> Table:
    headings = ("folder", "run", "seed", "K", "R", "steps", "seconds", "first loss", "last loss", "held out")
    rows: list[list[Value]] = [
        [
            run.member.folder, run.member.label, run.member.experiment.train.seed, run.record["K"], run.record["R"],
            run.record["steps"], run.record["seconds"], run.record["loss_first"], run.record["loss_last"],
            run.record.get(f"valid_{run.record['measure']}"),
        ]
        for run in finished
    ]  # fmt: skip
    return Table("runs", "All runs (measured)", headings, rows or [[None] * len(headings)], [])
