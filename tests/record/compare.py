"""What differs between two records, as plain paths and numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST = 6
"""Differences of one entry that are printed; the others are counted."""

OF_STEPS = ("loss", "gradient norm")
"""Lists that have a value for each step."""

DIGEST = re.compile("[0-9a-f]{64}")


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns a line for each entry that differs between two records, sorted by part; empty if they are equal."""
    lines = []
    for part in sorted({*a["parts"], *b["parts"]}):
        first, second = (record["parts"].get(part) for record in (a, b))
        if first is None or second is None:
            lines.append(f"{part}: only in {'B' if first is None else 'A'}")
            continue
        for name in sorted({*first, *second}):
            if name not in first or name not in second:
                if part != "costs":
                    lines.append(f"{part}/{name}: only in {'B' if name not in first else 'A'}")
                continue
            found = list(_values("", first[name]["result"], second[name]["result"]))
            more = [f"{len(found) - MOST} more"] if len(found) > MOST else []
            if found:
                lines.append(f"{part}/{name}: {'; '.join([*found[:MOST], *more])}")
    return lines


def information(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns what may differ: commit, date, CPU seconds, and costs that only one planner asked for."""
    lines = [f"{name}: {a[name]} -> {b[name]}" for name in ("commit", "date") if a[name] != b[name]]
    for part in sorted({*a["parts"]} & {*b["parts"]}):
        first, second = (record["parts"][part] for record in (a, b))
        seconds = [sum(entry.get("cpu_s", 0.0) for entry in entries.values()) for entries in (first, second)]
        if any(seconds):
            lines.append(f"{part}: {seconds[0]:.0f} -> {seconds[1]:.0f} CPU seconds")
        single = {*first} ^ {*second}
        if part == "costs" and single:
            lines.append(f"costs: {len(single)} shapes that only one of the two asked for")
    return lines


def _values(path: str, a: Any, b: Any) -> Iterator[str]:
    """Yields the differences of two values of JSON below a path."""
    if a == b and type(a) is type(b):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _mappings(path, a, b)
    elif isinstance(a, list) and isinstance(b, list):
        yield from _lists(path, a, b)
    else:
        yield f"{path} {_short(a)} -> {_short(b)}".strip()


def _mappings(path: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    common = [name for name in a if name in b]
    if len(common) > 1 and all(_is_digest(each[name]) for each in (a, b) for name in common):
        changed = [name for name in common if a[name] != b[name]]
        if changed:
            yield f"{path} of {len(changed)} of {len(common)} differ, first {changed[0]}".strip()
    else:
        for name in common:
            yield from _values(f"{path} {name}".strip(), a[name], b[name])
    for name in [*a, *b]:
        if name not in common:
            yield f"{path} {name} only in {'A' if name in a else 'B'}".strip()


def _lists(path: str, a: list[Any], b: list[Any]) -> Iterator[str]:
    """Yields one line: where two lists differ first, and in how many places."""
    places = range(max(len(a), len(b)))
    changed = [at for at in places if a[at : at + 1] != b[at : at + 1]]
    at = changed[0]
    where = (
        f"step {at + 1} {path}"
        if path in OF_STEPS
        else f"{path or ('line' if isinstance([*a, *b][at], str) else 'value')} {at + 1}:"
    )
    if at >= min(len(a), len(b)):
        longer, owner = (a, "A") if len(a) > len(b) else (b, "B")
        inner = f"only in {owner}: {_short(longer[at])}"
    else:
        inner = next(_values("", a[at], b[at]))
    size = f", {len(a)} -> {len(b)} values" if len(a) != len(b) else ""
    yield f"{where} {inner} ({len(changed)} of {len(places)} differ{size})"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _short(value: Any) -> str:
    text = str(value)
    if _is_digest(value):
        return text[:8]
    return text if len(text) <= 90 else f"{text[:87]}..."
