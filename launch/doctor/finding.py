"""What the doctor found: one line of its table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """Of a fault a run would end, or not begin; of a warning it would be slower, or may end later."""

    level: Level
    subject: str
    found: str
    """With numbers, and the node's name where it is one node's."""
    remedy: str = ""
    """What to do; empty where all is well."""


def ok(subject: str, found: str) -> Finding:
    """Returns a line about what is well."""
    return Finding("ok", subject, found)


def warning(subject: str, found: str, remedy: str) -> Finding:
    """Returns a line about what will do, though it should be better."""
    return Finding("warning", subject, found, remedy)


def fault(subject: str, found: str, remedy: str) -> Finding:
    """Returns a line about what no run gets past."""
    return Finding("fault", subject, found, remedy)
