"""Languages in three parts by the size of their text, as the paper tells of high- and low-resource languages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Third = Literal["high", "middle", "low"]
THIRDS: tuple[Third, ...] = ("high", "middle", "low")


def thirds(sizes: Mapping[str, int]) -> dict[str, Third]:
    """Returns the third of each language, those of most training pairs first, equal ones by name.

    Where three does not divide them, the first thirds have one more.
    """
    order = sorted(sizes, key=lambda language: (-sizes[language], language))
    base, more = divmod(len(order), 3)
    found: dict[str, Third] = {}
    for at, third in enumerate(THIRDS):
        start = at * base + min(at, more)
        found |= dict.fromkeys(order[start : start + base + (at < more)], third)
    return found
