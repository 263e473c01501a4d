"""Groups sentences that are decoded together by length."""

from __future__ import annotations

from collections.abc import Sequence

HYPOTHESES = 256
"""The most in a group: enough for large matrix products; their logits of 64,000 words take 64 MiB."""


def group_by_length(sources: Sequence[Sequence[int]], beam: int) -> list[list[int]]:
    """Returns the indices of the sources in groups with little padding, the longest first: the last groups, during
    which stages are idle, are short. The groups do not depend on K."""
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    rows = max(1, HYPOTHESES // beam)
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def group_by_equal_length(sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the indices of the sources in groups without padding: a decoder-only model would attend to it."""
    groups: list[list[int]] = []
    for index in sorted(range(len(sources)), key=lambda index: -len(sources[index])):
        if not groups or len(groups[-1]) == HYPOTHESES or len(sources[groups[-1][0]]) != len(sources[index]):
            groups.append([])
        groups[-1].append(index)
    return groups
