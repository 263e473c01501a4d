"""Tables of a sweep's scores: models by resource third, and languages by model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.scales import baseline_label
from experiments.sweeps.report.results import BILINGUAL_MODELS, CHRF, NLL, Metric, Results
from experiments.sweeps.report.verdicts import above_baseline
from suite.evaluation.scores import MEASURES, THIRDS, Third


def by_third(results: Results) -> Table:
    """Returns NLL and chrF by resource third: a row a multilingual model, one for the bilingual ones and one for the
    copied source."""
    columns: list[Column] = [(metric, third) for metric in (NLL, CHRF) for third in (*THIRDS, None)]
    headings = [f"{MEASURES[metric.name]} {third or 'all'}" for metric, third in columns]
    notes = [
        "Measured on test pairs: means over both directions and the languages of a third, then over seeds; ± is "
        "the 95% confidence interval of the mean over seeds.",
    ]
    for third in THIRDS:
        sized = [f"{code} ({results.train_pairs(code):,} training pairs)" for code in results.in_third(third)]
        notes.append(f"{third}: {', '.join(sized) or 'none'}")
    return Table("by-third", "Models by resource third", ["model", *headings], _rows(results, columns), notes)


def by_model(results: Results) -> Table:
    """Returns the size of each model, and the measures over all languages that are less reliable, or on parts."""
    columns: list[Column] = [(Metric("chrf", plain=True), None), (Metric("bleu"), None)]
    numbers = paper_numbers("multilingual")
    rows = _rows(results, columns)
    for row in rows:
        runs = results.runs_of(str(row[0]))
        sizes: list[Value] = [None, None, None, None]
        if runs:
            model = runs[0].experiment.model
            shape = f"T({model.blocks_per_stack}, {model.feed_forward}, {model.heads})"
            tokens = round(statistics.fmean(run.record["tokens"] for run in runs))
            sizes = [shape, runs[0].record["parameters"], tokens, len(runs)]
        row[1:1] = sizes
        row.append(dict(zip(numbers["models"], numbers["mean_bleu"], strict=True)).get(row[0]))
    headings = ["model", "here", "parameters", "tokens in the mean", "seeds", "chrF, no placeholders"]
    headings += ["BLEU", "BLEU (paper)"]
    notes = [
        "Measured, over all languages; ± is the 95% confidence interval of the mean over seeds. The paper's BLEU, "
        f"over 102 languages: {numbers['note']}"
    ]
    return Table("by-model", "Models", headings, rows, notes)


Column = tuple[Metric, Third | None]
"""A metric, and a third of the languages (None for all)."""


def _rows(results: Results, columns: Sequence[Column]) -> list[list[Value]]:
    """Returns a row for each of the compared models, and one for the copied source."""

    def row(name: str, label: str, languages: Sequence[str], copied: bool = False) -> list[Value]:
        cells = [(results.in_third(third, languages), replace(metric, copied=copied)) for metric, third in columns]
        return [name, *(results.shown(label, *cell) for cell in cells)]

    rows = [row(*model) for model in compared_models(results)]
    return [*rows, row("copying the source", results.multilingual_labels[0], results.languages, copied=True)]


def compared_models(results: Results) -> list[tuple[str, str, list[str]]]:
    """Returns the name, the label and the languages of each multilingual model, and of the bilingual ones together."""
    found = [(label, label, results.languages) for label in results.multilingual_labels]
    if results.baselines:
        found.append((f"bilingual {', '.join(results.baselines)}", BILINGUAL_MODELS, results.baselines))
    return found


def by_language(results: Results) -> Table:
    """Returns the baseline's chrF and each multilingual model's difference from it, one row per language."""
    rows: list[list[Value]] = []
    for code in results.languages:
        row: list[Value] = [code, results.thirds.get(code), results.train_pairs(code), results.test_pairs(code)]
        row.append(results.shown(results.multilingual_labels[0], [code], replace(CHRF, copied=True)))
        row.append(results.shown(baseline_label(code), [code], CHRF))
        for name in results.multilingual_labels:
            above = above_baseline(results, name, code)
            row.append(results.shown(name, [code], CHRF) if above is None else str(above))
        rows.append(row)
    headings = ["language", "third", "training pairs", "test pairs", "copied source", "bilingual"]
    headings += results.multilingual_labels
    notes = [
        "Measured. A model's column is its difference from the baseline, ± computed as in the findings, for this "
        "language alone; a value without a sign is chrF without a baseline, ± the 95% confidence interval of the "
        "mean over seeds. Means over both directions and seeds."
    ]
    return Table("by-language", "Languages: chrF beside the bilingual baseline", headings, rows, notes)


def by_direction(results: Results, models: Sequence[tuple[str, str, Sequence[str]]]) -> Table:
    """Returns NLL and chrF out of English and into it: a row for each (name, label, languages)."""
    columns = [Metric(name, into_english=into_english) for name in ("nll", "chrf") for into_english in (False, True)]
    rows: list[list[Value]] = [
        [name, *(results.shown(label, languages, metric) for metric in columns)] for name, label, languages in models
    ]
    headings = [f"{MEASURES[each.name]}, {'into' if each.into_english else 'out of'} English" for each in columns]
    notes = ["Measured; ± is the 95% confidence interval of the mean over seeds."]
    return Table("by-direction", "Directions", ("model", *headings), rows, notes)
