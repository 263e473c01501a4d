"""A report of sentences, tables and pictures, as one self-contained HTML page and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiments.report import figure
from experiments.report.table import Table, readable


@dataclass(frozen=True)
class Picture:
    """A figure and its caption: a vector graphic in HTML, a PNG beside Markdown."""

    name: str
    figure: Any
    """A matplotlib ``Figure``."""
    caption: str
    wide: bool = True
    """Whether it takes the whole width of the page, and scrolls on a narrow one."""


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    folded: Sequence[tuple[str, str]] = ()
    """Heading and text of what opens on a click, in HTML only."""
    links: Sequence[tuple[str, str]] = ()
    """Text and relative address, in HTML only."""

    @property
    def safe_links(self) -> Iterator[tuple[str, str]]:
        """The links' texts and addresses. Of an address that could run code in the page only the text."""
        for text, address in self.links:
            is_safe = ":" not in address or re.match("/|(https?|file|s3|gs)://", address)
            yield text, address if is_safe else ""

    @property
    def is_empty(self) -> bool:
        return not (self.sentences or self.tables or self.pictures or self.folded or self.links)


@dataclass(frozen=True)
class Page:
    """The whole report. The names of its files begin with ``name``."""

    title: str
    sections: Sequence[Section]
    name: str = field(default="report", kw_only=True)
    facts: Sequence[tuple[str, str]] = ()
    """Names and values of the most important numbers, above all sections, in HTML only."""
    warning: str = field(default="", kw_only=True)
    """What a reader must know first, such as that the numbers mean nothing."""

    def markdown(self) -> str:
        """Returns the page as Markdown; pictures are separate files."""
        parts = [f"# {self.title}\n", *([f"> **{self.warning}**\n"] if self.warning else [])]
        for section in self.sections:
            if section.is_empty:
                continue
            parts += [f"## {section.title}\n", *(f"{sentence}\n" for sentence in section.sentences)]
            parts += [f"![{p.caption}]({self._file(p)})\n\n{p.caption}\n" for p in section.pictures]
            parts += [table.markdown() for table in section.tables]
        return "\n".join(parts)

    def html(self) -> str:
        """Returns the page as HTML with embedded pictures. It refers to no other file but by its links."""
        from jinja2 import Environment

        text = files("experiments.report").joinpath("page.html").read_text()
        template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
        return template.render(page=self, readable=readable, svg=figure.svg)

    def write(self, folder: Path) -> list[Path]:
        """Writes ``report.html``, ``report.md`` and the Markdown's pictures; returns the paths of the first two."""
        folder.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            for picture in section.pictures:
                (folder / self._file(picture)).write_bytes(figure.png(picture.figure))
        paths = [folder / f"{self.name}.html", folder / f"{self.name}.md"]
        paths[0].write_text(self.html(), encoding="utf-8")
        paths[1].write_text(self.markdown())
        return paths

    def _file(self, picture: Picture) -> str:
        return f"{self.name}-{picture.name}.png"
