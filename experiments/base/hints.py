"""Commands and options in messages, as the user types them: ``make resume RUN=...`` or ``gpipe resume ...``."""

from __future__ import annotations

import os
import shlex

BY_MAKE = "GPIPE_BY_MAKE"
"""Environment variable that the Makefile sets: its targets work where the user is."""

_ARGUMENTS = ("NAME", "RUN", "TEXT")
_OPTION_RUN = ("submit", "report", "table", "diff")
"""Commands that take a run by an option."""


def command(target: str, **values: str) -> str:
    """Returns a command line; ``values`` are variables of the Makefile."""
    words = []
    for name, value in values.items():
        if not value and not _by_make():
            continue
        shown = f'"{value}"' if name in ("SET", "TEXT") else shlex.quote(value) if value else ""
        is_argument = name in _ARGUMENTS and not (name == "RUN" and target in _OPTION_RUN)
        words.append(shown if is_argument and not _by_make() else option(name, shown))
    return " ".join(["make" if _by_make() else "gpipe", target, *words])


def option(name: str, value: str = "") -> str:
    """Returns what sets a variable of the Makefile, or the same option of ``gpipe``; without a value, its name."""
    if _by_make():
        return f"{name}={value}"
    word = name if name in _ARGUMENTS and not value else f"--{name.lower()}"
    return f"{word} {value}".rstrip()


def _by_make() -> bool:
    return bool(os.environ.get(BY_MAKE))
