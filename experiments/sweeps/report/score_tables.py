"""Tables of a sweep's scores: models by resource third, and languages by model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.multilingual import baseline_label
from experiments.sweeps.report.results import METRICS, THIRDS, Results
from experiments.translation.experiment import TranslationExperiment


def mean_and_deviation(values: Sequence[float]) -> str | None:
    """Returns ``mean ± deviation`` over seeds, only the mean for one seed, None for none."""
    if not values:
        return None
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def by_third(results: Results) -> Table:
    """Returns BLEU and chrF by resource third, one row per multilingual model and one for the baselines."""
    rows: list[list[Value]] = []
    numbers = paper_numbers("multilingual")
    for name in results.multilingual_labels:
        runs = results.runs_of(name)
        record, experiment = runs[0].record, runs[0].member.experiment
        assert isinstance(experiment, TranslationExperiment)
        scores = [
            mean_and_deviation(results.means(name, results.in_third(third), metric))
            for metric in METRICS
            for third in (*THIRDS, None)
        ]
        nll = mean_and_deviation([run.record["valid_nll"] for run in runs])
        shape = f"T({experiment.model.layers}, {experiment.model.feed_forward}, {experiment.model.heads})"
        mean = dict(zip(numbers["models"], numbers["mean_bleu"], strict=True)).get(name)
        rows.append([name, shape, record["parameters"], record["tokens"], len(runs), *scores, nll, mean])
    if results.baselines:
        scores = [
            mean_and_deviation(results.bilingual_means(results.in_third(third, results.baselines), metric))
            for metric in METRICS
            for third in (*THIRDS, None)
        ]
        first = results.runs_of(baseline_label(results.baselines[0]))
        what = f"bilingual, {len(results.baselines)} models"
        rows.append(
            [what, "", first[0].record["parameters"], first[0].record["tokens"], len(first), *scores, None, None]
        )
    headings = ["model", "here", "parameters", "tokens each", "seeds"]
    headings += [f"{metric} {third}" for metric in METRICS.values() for third in (*THIRDS, "all")]
    return Table(
        "by-third", "Models by resource third", [*headings, "validation nats a token", "BLEU all (paper)"], rows,
        [
            "Means over both directions and the languages of a third, then over seeds; ± the standard deviation "
            f"between seeds. The paper's BLEU, over 102 languages: {numbers['note']}",
            *(f"{third}: {_sized(results, results.in_third(third))}" for third in THIRDS),
        ],
    )  # fmt: skip


def by_language(results: Results) -> Table:
    """Returns the baseline's BLEU and each multilingual model's difference from it, one row per language."""
    rows: list[list[Value]] = []
    for code in results.languages:
        alone = results.means(baseline_label(code), [code])
        row: list[Value] = [code, results.thirds.get(code), results.train_pairs(code), _test_pairs(results, code)]
        row.append(mean_and_deviation(alone))
        for name in results.multilingual_labels:
            values = results.means(name, [code])
            if alone and values:
                row.append(f"{statistics.fmean(values) - statistics.fmean(alone):+.2f}")
            else:
                row.append(mean_and_deviation(values))
        rows.append(row)
    headings = ["language", "third", "training pairs", "test pairs", "bilingual BLEU", *results.multilingual_labels]
    return Table(
        "by-language", "Languages: BLEU beside the bilingual baseline", headings, rows or [[None] * len(headings)],
        ["A model's column is its difference from the baseline; a value without a sign is BLEU without a baseline. "
         "Means over both directions and seeds."],
    )  # fmt: skip


def _sized(results: Results, codes: Sequence[str]) -> str:
    return ", ".join(f"{code} ({results.train_pairs(code):,} training pairs)" for code in codes) or "none"


def _test_pairs(results: Results, code: str) -> int | None:
    for run in results.runs:
        if found := run.scores["directions"].get(f"en-{code}"):
            return int(found["pairs"])
    return None
