"""Consoles that print what they are given and never obey it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_COLOUR_OR_CURSOR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


class Terminal(Console):
    """A console without markup that obeys no escape sequence in a text: logs, names and messages may come from another
    machine or another user. Colours are left out; any other control character is shown by its code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, soft_wrap=True, **options)
        if not self.is_terminal and "width" not in options:  # a file or a pipe gets tables as wide as their words
            self.width = 1000

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of anything that is printed; rich's own control segments stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_printable(segment.text))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return _COLOUR_OR_CURSOR.sub("", text).translate(_CONTROL).encode(errors="backslashreplace").decode()
