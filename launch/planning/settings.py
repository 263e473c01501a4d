"""``gpipe settings``: every setting with its type, default, unit and description, and its value in an experiment."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from experiments.base.setting_rows import REQUIRED, Setting, describe_settings, values
from experiments.names import Scale
from experiments.registry import TASKS, find, resolve
from experiments.report.table import Table
from experiments.translation.score_settings import ScoreRecord
from launch.backends.select import cluster_backend
from suite.errors import SettingError

WIDTH = 100
"""Columns of the table; fewer on a terminal that is narrower."""

INTRODUCTION = f"""\
# Settings

`gpipe settings --format markdown > docs/settings.md` writes this page. `gpipe settings NAME` (`make settings NAME=`)
also prints the values in one experiment; `--scale` and `--set` work as in `gpipe experiment`.

Set a value with `SET="train.steps=50 pipeline.stages=4"`, or `--set` on the command line. A setting whose default is
`{REQUIRED}` has a value of its own in every experiment. `transformer_<L>` has the task `language_model`, your own
models have `custom` ([own-model.md](own-model.md)).
"""


def print_settings(name: str, scale: Scale, settings: str, form: str, console: Console) -> None:
    """Prints all settings, or those of one experiment with their values.

    Raises SettingError for an unknown experiment or a bad setting.
    """
    if settings and not name:
        raise SettingError(f"which experiment has {settings}? Name it: gpipe settings NAME")
    sections = [_values(name, scale, settings)] if name else all_settings()
    if form == "markdown":
        print("\n".join([*([] if name else [INTRODUCTION]), *map(_markdown, sections)]), end="")
        return
    for section in sections:
        console.print(_for_terminal(section, min(WIDTH, console.width) if console.is_terminal else WIDTH))


class _Section(NamedTuple):
    title: str
    rows: list[Setting]
    values: dict[str, str] | None = None
    note: str = ""


def all_settings() -> list[_Section]:
    """Returns the settings that all experiments have, then for each task those that not all have."""
    tasks = {task: describe_settings(record) for task, record in TASKS.items()}
    common = [row for row in next(iter(tasks.values())) if all(row in rows for rows in tasks.values())]
    return [
        _Section("All experiments", common),
        *(
            _Section(f"Task `{task}`: more settings", [row for row in rows if row not in common])
            for task, rows in tasks.items()
        ),
        _Section("`gpipe score`", describe_settings(ScoreRecord)),
    ]


def _values(name: str, scale: Scale, settings: str) -> _Section:
    """Returns an experiment's settings as it would run here, with the paper's numbers even where they do not fit."""
    paper = find(name)
    if scale == "paper" and paper.scale == "paper":
        chosen, note = paper.with_settings(settings), f"{name} at scale paper"
    else:
        with closing(cluster_backend()) as backend:
            chosen, note = resolve(name, scale, backend.cluster(), settings)
    return _Section(name, describe_settings(type(chosen)), values(chosen), note)


def _markdown(section: _Section) -> str:
    headings = ["name", "type (unit)", "default", *(["value"] if section.values else []), "description"]
    rows = []
    for row in section.rows:
        kind = f"{row.type} ({row.unit})" if row.unit else row.type
        value = [section.values[row.name]] if section.values else []
        rows.append([f"`{row.name}`", kind, row.default, *value, row.description])
    notes = [section.note] if section.note else []
    return Table("settings", section.title, headings, rows, notes).markdown().rstrip() + "\n"


def _for_terminal(section: _Section, width: int) -> Shown:
    """Returns a table with the type after the description: a column of its own makes the rows too tall."""
    shown = Shown(
        title=section.title,
        caption=section.note,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        width=width,
    )
    shown.add_column("setting", no_wrap=True)
    for heading in ("default", *(["value"] if section.values else []), "unit", "description (type)"):
        shown.add_column(heading, overflow="fold")
    for row in section.rows:
        value = [section.values[row.name]] if section.values else []
        shown.add_row(row.name, row.default, *value, row.unit, f"{row.description.removesuffix('.')} ({row.type})")
    return shown
