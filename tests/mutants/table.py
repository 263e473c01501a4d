"""What a run has found, as text, and what two runs found differently."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutants.choice import room_of
from tests.mutants.equal import EQUAL

BY_HAND = "by hand"

COLUMNS = ("mutants", "its file", "its room", "other files", "hangs", "not found", "equal", "not executed", "gone")

FOUND = ("found", "hangs")


def results(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the first line of a file of results, and the results by the key of the mutant."""
    first, *lines = map(json.loads, path.read_text().splitlines())
    return first, {line["key"]: line for line in lines}


def summary(path: Path) -> str:
    """Returns the counts by room and by operator, and the mutants that no test found, in Markdown."""
    first, found = results(path)
    text = [f"Commit {first['commit'][:10]}, at most {first['budget_s']:g} s of tests per mutant.", ""]
    text += _counts("room", found, lambda line: BY_HAND if _is_by_hand(line) else room_of(line["identity"][0]))
    text += ["", *_counts("operator", found, lambda line: line["identity"][2])]
    for outcome in ("not found", "not executed"):
        lines = [line for line in found.values() if _column(line) == outcome]
        text += ["", f"## {outcome.capitalize()}", "", "| where | function | change | tests |", "|---|---|---|---|"]
        text += [
            f"| {_place(line)} | {line['identity'][1]} | {_change(line)} | {_tests(line)} |"
            for line in sorted(lines, key=lambda line: (line["identity"][0], line["line"]))
        ]
    equal = [line for line in found.values() if _column(line) == "equal"]
    text += ["", "## Equal", "", "| where | change | why no test can see it |", "|---|---|---|"]
    text += [f"| {_place(line)} | {_change(line)} | {EQUAL[line['key']]} |" for line in equal]
    return "\n".join(text) + "\n"


def everything(path: Path) -> str:
    """Returns a row for each mutant, in Markdown."""
    rows = [
        f"| {_place(line)} | {line['identity'][1]} | {_change(line)} | {_column(line)} | {_cell(line['by'])} |"
        for line in results(path)[1].values()
        if line["outcome"] != "gone"
    ]
    return (
        "\n".join(["| where | function | change | found by | first test |", "|---|---|---|---|---|", *sorted(rows)])
        + "\n"
    )


def finders(path: Path, number: int = 20) -> str:
    """Returns the tests that were the first to find the most mutants: one that finds too much may be unreliable."""
    counts = Counter(line["by"] for line in results(path)[1].values() if line.get("by"))
    return "\n".join(f"{count:4} {name}" for name, count in counts.most_common(number)) + "\n"


def compare(before: Path, after: Path) -> str:
    """Returns the mutants that were found before and are not found after, and the other way round."""
    old, new = results(before)[1], results(after)[1]
    both = [(old[key], new[key]) for key in old if key in new and new[key]["outcome"] != "gone"]
    lost = [pair for pair in both if _is_found(pair[0]) and not _is_found(pair[1])]
    gained = [pair for pair in both if not _is_found(pair[0]) and _is_found(pair[1])]
    gone = sum(line["outcome"] == "gone" for line in new.values())
    text = [
        f"{len(both)} mutants in both: {sum(_is_found(line) for line, _ in both)} found before, "
        f"{sum(_is_found(line) for _, line in both)} found after; the code of {gone} is gone, "
        f"{len(old.keys() - new.keys())} were not run again"
    ]
    text += [f"lost: {_place(line)}: {_change(line)} (by {was['by']}), now {line['outcome']}" for was, line in lost]
    text += [f"gained: {_place(line)}: {_change(line)} (by {line['by']})" for _, line in gained]
    return "\n".join(text) + "\n"


def _counts(title: str, found: dict[str, dict[str, Any]], group: Any) -> list[str]:
    counts: dict[str, Counter[str]] = {}
    for line in found.values():
        name = "gone" if line["outcome"] == "gone" else group(line)
        for row in (name, "all"):
            counts.setdefault(row, Counter()).update([_column(line), "mutants"])
    rows = sorted(counts, key=lambda row: (row == "all", row))
    head = [f"| {title} | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    return [*head, *(f"| {row} | {' | '.join(str(counts[row][column]) for column in COLUMNS)} |" for row in rows)]


def _column(line: dict[str, Any]) -> str:
    if line["outcome"] == "found":
        return str(line["where"])
    return "equal" if not _is_found(line) and line["key"] in EQUAL else str(line["outcome"])


def _is_found(line: dict[str, Any]) -> bool:
    return line["outcome"] in FOUND


def _is_by_hand(line: dict[str, Any]) -> bool:
    return line["identity"][2] == BY_HAND


def _place(line: dict[str, Any]) -> str:
    return f"{line['identity'][0]}:{line['line']}"


def _change(line: dict[str, Any]) -> str:
    _, _, operator, text, changed, _ = line["identity"]
    if operator == BY_HAND:
        return _cell(text)
    return f"{operator}: `{_cell(text)}` -> `{_cell(changed)}`"


def _cell(text: str, most: int = 120) -> str:
    """Returns a text that stays in its cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= most else f"{text[:most]}..."


def _tests(line: dict[str, Any]) -> str:
    return f"{line['tests']}" + (f", {line['left_out']} left out" if line["left_out"] else "")
