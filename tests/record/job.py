"""A part of the record as jobs, which run two at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """Makes one entry of a part."""

    name: str
    make: Callable[..., dict[str, Any]]
    """Returns {"result": JSON}, and "cpu_s" and "costs" if there are any."""
    arguments: tuple[Any, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Returns what it makes, or its error, with its seconds."""
        begin = time.monotonic()
        try:
            made = self.make(*self.arguments)
        except Exception as error:
            made = {"result": {"error": f"{type(error).__name__}: {error}"}}
        return made | {"seconds": round(time.monotonic() - begin, 1)}
