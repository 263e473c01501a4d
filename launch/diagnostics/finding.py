"""One finding of the doctor: a line of its table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A fault makes a run fail or prevents its start; a warning makes it slower or may make it fail later."""

    level: Literal["ok", "warning", "fault"]
    subject: str
    found: str
    """With numbers, and the node's name if it concerns one node."""
    remedy: str = ""
    """What to do; empty for ok."""


ok, warning, fault = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "fault")


def count_of(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
