"""The scores of a run, and some of its translations beside their references."""

from __future__ import annotations

from pathlib import Path

from experiments.report.page import Section
from experiments.report.table import Table, Value, aligned
from launch.watching.run_data import RunData

DIRECTIONS, SENTENCES = 4, 2
"""Directions that are shown, and sentences of each."""

LONGEST = 400
"""Characters of a sentence that are shown."""


def score_section(run: RunData) -> Section:
    """Returns the scores and samples; empty before ``make score``."""
    if not run.scores:
        return Section("Translations")
    directions = run.scores["directions"]
    ranked = sorted(directions, key=lambda name: -directions[name]["bleu"])
    means: list[list[Value]] = [
        [f"{shown}{whose}", *run.scores[macro][measure].values()]
        for measure, shown in (("bleu", "BLEU"), ("chrf", "chrF"))
        for whose, macro in (("", "macro"), (" of the copied source", "macro_copy"))
        if macro in run.scores
    ]
    columns = ("", *run.scores["macro"]["bleu"])
    rows: list[list[Value]] = [
        [
            name,
            directions[name]["pairs"],
            directions[name]["train_pairs"],
            directions[name]["bleu"],
            directions[name]["chrf"],
        ]
        for name in ranked
    ]
    tables = [
        Table("scores", "Means of languages and directions", columns, means, list(run.scores["signatures"].values())),
        *_samples(run.run.path / "scores", _spread(ranked)),
    ]
    sentence = f"Checkpoint of step {run.scores['step']:,}, beam {run.scores['beam']}, the {run.scores['split']} split."
    headings = ("direction", "pairs", "training pairs", "BLEU", "chrF")
    return Section(
        "Translations", [sentence], tables, folded=[(f"scores of {len(rows)} directions", aligned(headings, rows))]
    )


def _samples(folder: Path, directions: list[str]) -> list[Table]:
    """Returns one table a direction: source, translation and reference of its first sentences."""
    tables = []
    for name in directions:
        texts = {kind: _lines(folder / f"{name}.{kind}") for kind in ("src", "hyp", "ref")}
        rows: list[list[Value]] = []
        for source, translation, reference in list(zip(*texts.values(), strict=False))[:SENTENCES]:
            rows += [["source", source], ["translation", translation or "(empty)"], ["reference", reference]]
        if rows:
            tables.append(Table(f"samples-{name}", f"Samples: {name}", ("", "text"), rows, []))
    return tables


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line[:LONGEST] for line in path.read_text(encoding="utf-8").split("\n")[:SENTENCES]]


def _spread(ranked: list[str]) -> list[str]:
    """Returns directions from the best to the worst, evenly spaced."""
    if len(ranked) <= DIRECTIONS:
        return ranked
    return [ranked[at * (len(ranked) - 1) // (DIRECTIONS - 1)] for at in range(DIRECTIONS)]
