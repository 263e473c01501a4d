"""Tables of a sweep's scores: of its models in groups, and of each language beside its bilingual baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.scales import baseline_label
from experiments.sweeps.report.results import BILINGUAL_MODELS, CHRF, NLL, Metric, Results
from experiments.sweeps.report.verdicts import above_baseline
from suite.evaluation.scores import MEASURES, THIRDS

COLUMNS = {
    **{MEASURES[name]: Metric(name) for name in MEASURES},
    "chrF, no placeholders": Metric("chrf", plain=True),
    **{
        f"{MEASURES[metric.name]}, {way} English": replace(metric, into_english=way == "into")
        for metric in (NLL, CHRF)
        for way in ("out of", "into")
    },
}
"""The metrics of the table of scores, by heading."""


@dataclass(frozen=True)
class Group:
    """Models that are compared on the same text."""

    where: str
    """The text, such as ``low: da, gl``."""
    models: Sequence[tuple[str, str, Sequence[str]]]
    """Name, label and languages of each."""


def thirds_and_all(results: Results) -> Iterator[Group]:
    """Yields a group for each resource third and one for all languages, of the multilingual models and the bilingual
    ones together."""
    for third in (*THIRDS, None):
        languages = results.in_third(third)
        models = [(label, label, languages) for label in results.multilingual_labels]
        if alone := [code for code in languages if code in results.baselines]:
            name = BILINGUAL_MODELS if alone == languages else f"{BILINGUAL_MODELS} {', '.join(alone)}"
            models.append((name, BILINGUAL_MODELS, alone))
        if languages:
            yield Group(f"{third}: {', '.join(languages)}" if third else "all", models)


def score_table(results: Results, groups: Sequence[Group]) -> Table:
    """Returns a row for each model of each group, and one for copying the source."""
    rows: list[list[Value]] = []
    for group in groups:
        for name, label, languages in group.models:
            seeds = len(results.model_of(label, languages))
            scores = (results.shown(label, languages, metric) for metric in COLUMNS.values())
            rows.append([group.where, name, seeds, *scores])
        scored = ((label, languages) for _, label, languages in group.models if results.runs_of(label))
        label, languages = next(scored, ("", []))
        copied = (results.shown(label, languages, replace(metric, copied=True)) for metric in COLUMNS.values())
        rows.append([group.where, "copying the source", None, *copied])
    notes = [
        "Measured on test pairs: means over the directions, then over the languages, then over seeds; NLL in nats per "
        "token. ± is the 95% confidence interval of the mean over seeds."
    ]
    if results.languages:
        numbers = paper_numbers("multilingual")
        bleu = ", ".join(f"{name} {value}" for name, value in zip(numbers["models"], numbers["mean_bleu"], strict=True))
        notes.append(f"The paper's BLEU over 102 languages: {bleu}. {numbers['note']}")
    return Table("scores", "Scores of the models", ("where", "model", "seeds", *COLUMNS), rows, notes)


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
