"""The type of a function that prints or records a line of text."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]
