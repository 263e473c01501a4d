"""Splits languages into thirds by the size of their text, like the paper's high- and low-resource languages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Third = Literal["high", "middle", "low"]
THIRDS: tuple[Third, ...] = ("high", "middle", "low")


def thirds(sizes: Mapping[str, int]) -> dict[str, Third]:
    """Returns the third of each language, sorted by descending number of training pairs, then by name.

    If three does not divide the number of languages, the first thirds get one more.
    """
    order = sorted(sizes, key=lambda language: (-sizes[language], language))
    base, extra = divmod(len(order), 3)
    third_of: dict[str, Third] = {}
    for at, third in enumerate(THIRDS):
        start = at * base + min(at, extra)
        third_of |= dict.fromkeys(order[start : start + base + (at < extra)], third)
    return third_of
