"""A report of sentences, tables and pictures, as one self-contained HTML page and as Markdown."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from experiments.report.table import Table, readable


@dataclass(frozen=True)
class Picture:
    """A PNG and its caption."""

    name: str
    png: bytes
    caption: str

    @property
    def url(self) -> str:
        """The picture as a data URL."""
        return f"data:image/png;base64,{b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Page:
    """The whole report. The names of its files begin with ``name``."""

    title: str
    sections: Sequence[Section]
    name: str = field(default="report", kw_only=True)

    def markdown(self) -> str:
        """Returns the page as Markdown; pictures are separate files."""
        parts = [f"# {self.title}\n"]
        for section in self.sections:
            parts.append(f"## {section.title}\n")
            parts += [f"{sentence}\n" for sentence in section.sentences]
            parts += [f"![{p.caption}]({self._file(p)})\n\n{p.caption}\n" for p in section.pictures]
            parts += [table.markdown() for table in section.tables]
        return "\n".join(parts)

    def html(self) -> str:
        """Returns the page as HTML with embedded pictures."""
        from jinja2 import Environment

        text = files("experiments.report").joinpath("page.html").read_text()
        template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
        return template.render(page=self, readable=readable)

    def write(self, folder: Path) -> list[Path]:
        """Writes ``report.html``, ``report.md`` and the Markdown's pictures; returns the paths of the first two."""
        folder.mkdir(parents=True, exist_ok=True)
        for section in self.sections:
            for picture in section.pictures:
                (folder / self._file(picture)).write_bytes(picture.png)
        paths = [folder / f"{self.name}.html", folder / f"{self.name}.md"]
        paths[0].write_text(self.html())
        paths[1].write_text(self.markdown())
        return paths

    def _file(self, picture: Picture) -> str:
        return f"{self.name}-{picture.name}.png"
