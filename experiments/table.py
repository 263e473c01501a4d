"""A table of results: for the terminal, as Markdown and as CSV. Headings say how each number was come by."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as Shown

Value = str | int | float | None

Report = Callable[[int, int, str], None]
"""Hears before each part of a table how many are done, how many there are, and which comes now."""


def silent(done: int, total: int, part: str) -> None:
    """A report to nobody."""


@dataclass(frozen=True)
class Table:
    """Rows of values under headings; numbers are rounded for reading, and whole in the CSV."""

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str]

    def shown(self) -> Shown:
        """Returns it for the terminal. Only this needs rich."""
        from rich.table import Table as Shown

        table = Shown(title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left")
        for heading, value in zip(self.headings, self.rows[0], strict=True):
            table.add_column(heading, justify="left" if isinstance(value, str) else "right")
        for row in self.rows:
            table.add_row(*map(readable, row))
        return table

    def markdown(self) -> str:
        """Returns it as Markdown, notes below."""
        lines = [f"### {self.title}", "", _line(self.headings), _line(["---"] * len(self.headings))]
        lines += [_line(map(readable, row)) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def csv(self) -> str:
        """Returns it as CSV, without notes."""
        file = io.StringIO()
        csv.writer(file).writerows([self.headings, *self.rows])
        return file.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Writes ``<name>.md`` and ``<name>.csv`` and returns their places."""
        folder.mkdir(parents=True, exist_ok=True)
        places = [folder / f"{self.name}.md", folder / f"{self.name}.csv"]
        places[0].write_text(self.markdown())
        places[1].write_text(self.csv())
        return places


def readable(value: Value) -> str:
    """Returns a value to be read: four digits that count, thousands apart, a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: object) -> str:
    return "| " + " | ".join(cells) + " |"  # type: ignore[arg-type]
