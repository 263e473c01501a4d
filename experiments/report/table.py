"""A table of results for the terminal, as Markdown and as CSV. Headings say how each number was obtained."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as Shown

Value = str | int | float | None

ReportProgress = Callable[[int, int, str], None]
"""Called before each part of a table with the number of parts done, their total, and the part's name."""


@dataclass(frozen=True)
class Table:
    """Rows of values under headings; numbers are rounded for display and exact in the CSV."""

    name: str
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str]

    def rich_table(self) -> Shown:
        """Returns the table for the terminal. Only this needs rich."""
        from rich.table import Table as Shown

        table = Shown(title=self.title, title_justify="left", caption="\n".join(self.notes), caption_justify="left")
        for heading, value in zip(self.headings, self.rows[0], strict=True):
            table.add_column(heading, justify="left" if isinstance(value, str) else "right")
        for row in self.rows:
            table.add_row(*map(readable, row))
        return table

    def markdown(self) -> str:
        """Returns the table as Markdown, with notes below."""
        lines = [f"### {self.title}", "", _line(self.headings), _line(["---"] * len(self.headings))]
        lines += [_line(map(readable, row)) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def csv(self) -> str:
        """Returns the table as CSV, without notes."""
        file = io.StringIO()
        csv.writer(file).writerows([self.headings, *self.rows])
        return file.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Writes ``<name>.md`` and ``<name>.csv`` and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.md", folder / f"{self.name}.csv"]
        paths[0].write_text(self.markdown())
        paths[1].write_text(self.csv())
        return paths


def relative_spread(seconds: Sequence[float]) -> float:
    """Returns (slowest - fastest) / median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


def readable(value: Value) -> str:
    """Formats a value: four significant digits, thousands separators, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[Value]]) -> str:
    """Returns rows as lines of text, as wide as their content; columns of numbers are aligned to the right."""
    lines = [tuple(headings), *(tuple(map(readable, row)) for row in rows)]
    left = ["" if re.match(r"[\d.,]+(\W|$)", cell) else "-" for cell in lines[-1]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"%{side}{width}s" for side, width in zip(left, widths, strict=True))
    return "\n".join((form % line).rstrip() for line in lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
