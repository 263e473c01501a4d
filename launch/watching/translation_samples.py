"""The scores of a run, and some of its translations beside their references."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from experiments.report.page import Section
from experiments.report.table import Table, Value, aligned
from launch.watching.run_data import RunData
from suite.evaluation.scores import MEASURES
from suite.training.jsonl import read_lines

SENTENCES = 20
"""Test translations that are shown, drawn at random."""

LONGEST = 400
"""Characters of a sentence that are shown."""

_COLUMNS = ("direction", "source", "translation", "reference")


def score_section(run: RunData) -> Section:
    """Returns the scores and samples; before ``make score`` the few samples of the run's end, if it has some."""
    if not run.scores:
        return Section("Translations", tables=_end_samples(run.run.samples))
    directions = run.scores["directions"]
    ranked = sorted(directions.items(), key=lambda item: -item[1]["bleu"])
    columns = ("", *run.scores["macro"]["bleu"])
    rows: list[list[Value]] = [
        [name, each["pairs"], each["train_pairs"], each.get("nll"), each["bleu"], each["chrf"]] for name, each in ranked
    ]
    signatures = list(run.scores["signatures"].values())
    means = Table("scores", "Means of languages and directions", columns, mean_rows(run.scores), signatures)
    tables = [means, *_samples(run.run.path / "scores", list(directions))]
    sentence = f"Checkpoint of step {run.scores['step']:,}, beam {run.scores['beam']}, the {run.scores['split']} split."
    headings = ("direction", "pairs", "training pairs", "test NLL", "BLEU", "chrF")
    folded = [(f"scores of {len(rows)} directions", aligned(headings, rows))]
    return Section("Translations", [sentence], tables, folded=folded)


def mean_rows(scores: dict[str, Any]) -> list[list[Value]]:
    """Returns the means of each measure over all languages and over each third, of translations and of copies."""
    return [
        [f"{shown}{whose}", *scores[macro][measure].values()]
        for measure, shown in MEASURES.items()
        for whose, macro in (("", "macro"), (" of the copied source", "macro_copy"))
        if measure in scores.get(macro, {})
    ]


def _end_samples(path: Path) -> list[Table]:
    rows: list[list[Value]] = [[line[name][:LONGEST] or "(empty)" for name in _COLUMNS] for line in read_lines(path)]
    title = "Held-out strings of the languages with the most text"
    return [Table("samples", title, _COLUMNS, rows, [])] if rows else []


def _samples(folder: Path, directions: list[str]) -> list[Table]:
    """Returns a table of test translations drawn at random from all directions; none without the texts."""
    pairs = [(name, *lines) for name in directions for lines in zip(*_texts(folder, name), strict=False)]
    drawn = sorted(random.Random(0).sample(range(len(pairs)), min(SENTENCES, len(pairs))))
    rows: list[list[Value]] = [
        [name, source, translation or "(empty)", reference]
        for name, source, translation, reference in (pairs[at] for at in drawn)
    ]
    if not rows:
        return []
    title = f"{len(rows)} of {len(pairs):,} test translations, drawn at random"
    return [Table("samples", title, _COLUMNS, rows, [])]


def _texts(folder: Path, direction: str) -> list[list[str]]:
    paths = [folder / f"{direction}.{kind}" for kind in ("src", "hyp", "ref")]
    return [
        [line[:LONGEST] for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        for path in paths
    ]
