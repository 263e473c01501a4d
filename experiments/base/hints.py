"""Commands and options in messages, as the user types them: ``gpipe resume ...``, ``--scale laptop``."""

from __future__ import annotations

import shlex

_ARGUMENTS = ("NAME", "RUN", "TEXT")
_OPTION_RUN = ("submit", "report", "table", "diff")
"""Commands that take a run by an option."""


def command(target: str, **values: str) -> str:
    """Returns a command line; ``values`` are arguments and options in capitals, of which empty ones are left out."""
    words = []
    for name, value in values.items():
        if value:
            shown = f'"{value}"' if name in ("SET", "TEXT") else shlex.quote(value)
            is_argument = name in _ARGUMENTS and not (name == "RUN" and target in _OPTION_RUN)
            words.append(shown if is_argument else option(name, shown))
    return " ".join(["gpipe", target, *words])


def option(name: str, value: str = "") -> str:
    """Returns an option with its value; without one, the name of the option or argument."""
    word = name if name in _ARGUMENTS and not value else f"--{name.lower()}"
    return f"{word} {value}".rstrip()
