"""One finding of the doctor: a line of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """A fault makes a run fail or prevents its start; a warning makes it slower or may make it fail later."""

    level: Level
    subject: str
    found: str
    """With numbers, and the node's name if it concerns one node."""
    remedy: str = ""
    """What to do; empty for ok."""


def ok(subject: str, found: str) -> Finding:
    return Finding("ok", subject, found)


def warning(subject: str, found: str, remedy: str) -> Finding:
    return Finding("warning", subject, found, remedy)


def fault(subject: str, found: str, remedy: str) -> Finding:
    return Finding("fault", subject, found, remedy)


def count_of(count: int, word: str) -> str:
    """Returns a number with its noun."""
    return f"{count} {word}{'' if count == 1 else 's'}"
