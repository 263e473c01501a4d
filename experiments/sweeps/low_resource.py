"""Transfer to a low-resource language: alone, with relatives, with unrelated languages, by its number of pairs.

This is the paper's claim that one multilingual model beats bilingual ones on low-resource languages (section 5, figure
6), tested with a rule for the budget that favours neither: docs/sweeps.md.

validation NLL of the language    validation pairs, at the run's best checkpoint: for tuning and for the three budgets
test NLL, chrF, BLEU              test pairs, mean of both directions; copying the source has a row of its own
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.report.figure import INK, new_figure
from experiments.report.page import Picture
from experiments.report.table import Table, Value
from experiments.sweeps.members.few_pairs import ALONE, NAME, RULES, alone, cases, low_resource_members
from experiments.sweeps.members.tuning import SETTINGS
from experiments.sweeps.report.figures import draw_lines, with_margins
from experiments.sweeps.report.margins import mean_and_margin
from experiments.sweeps.report.results import CHRF, NLL, Metric, Results, Run, scored_step
from experiments.sweeps.report.score_tables import by_direction
from experiments.sweeps.report.verdicts import Verdict, compare
from experiments.sweeps.text_base import text_sweep
from suite.data.text.sampling import temperature_weights
from suite.training.jsonl import read_lines
from suite.training.metrics import STEP, units_done

MEASURES = {
    "test NLL": NLL,
    "chrF": CHRF,
    "BLEU": Metric("bleu"),
    "chrF, no placeholders": Metric("chrf", plain=True),
}

PAPER = "one multilingual model beats bilingual ones, most on low-resource languages"


@dataclass(frozen=True)
class Validations:
    """A run's validations of its language."""

    run: Run
    points: list[tuple[int, float]]
    """(tokens seen, NLL in nats per token)"""
    best_tokens: int
    """Of the best checkpoint, as ``best_nll``."""
    best_nll: float

    @classmethod
    def read(cls, run: Run) -> Validations:
        (language,) = run.languages
        tokens, points = 0, {}
        for line in read_lines(run.folder / "metrics.jsonl"):
            tokens = int(line.get(units_done("tokens"), tokens))
            if (nll := line.get(f"valid/nll/{language}")) is not None:
                points[int(line[STEP])] = tokens, float(nll)
        return cls(run, [*points.values()], *points[scored_step(run.record)])

    @property
    def share(self) -> float:
        """The share of its tokens that are of the language: its probability, computed."""
        text, (language,) = self.run.experiment.text, self.run.languages
        counts = dict(limit.split(":") for limit in text.train_pairs or ())
        others = [int(counts[code]) for code in text.languages or () if code != language]
        return float(temperature_weights([_train_pairs(self.run), *others], text.temperature)[0])

    def nll_at(self, tokens: float) -> float | None:
        """Returns the best NLL until so many tokens; None before the first validation."""
        return min((nll for at, nll in self.points if at <= tokens), default=None)


def _train_pairs(run: Run) -> int:
    """Returns the training pairs of the language that a run is scored in."""
    return next(int(scores["train_pairs"]) for scores in run.scores["directions"].values())


def verdicts(results: Results) -> list[Verdict]:
    """Relatives against the tuned bilingual model, and against as many pairs of unrelated languages, if any."""
    found = []
    for case in cases(results.scale):
        language, (alone, relatives, *control) = case.rule.language, case.labels
        others = [(alone, "beats the tuned bilingual model", PAPER)]
        others += [(other, "beats one with unrelated languages", "the paper does not test this") for other in control]
        for other, what, paper in others:
            compared = compare(results, relatives, other, [language], case.labels)
            finding = f"{case.title}: the multilingual model {what}"
            found.append(Verdict(finding, paper, ((language, compared),), compared.outcome))
    return found


def score_table(results: Results) -> Table:
    """Returns one row per model of each case, and one for copying the source."""
    rows: list[list[Value]] = []
    for case in cases(results.scale):
        language = [case.rule.language]
        for model in case.models:
            label, runs = case.label(model), results.runs_of(case.label(model))
            tokens = statistics.fmean(Validations.read(run).best_tokens for run in runs) if runs else None
            scores = (results.shown(label, language, metric) for metric in MEASURES.values())
            rows.append([case.title, model, len(runs), *scores, tokens])
        scored = next((label for label in case.labels if results.runs_of(label)), "")
        copied = (results.shown(scored, language, replace(metric, copied=True)) for metric in MEASURES.values())
        rows.append([case.title, "copying the source", None, *copied, None])
    headings = ("language and pairs", "model", "seeds", *MEASURES, "tokens at the best checkpoint")
    notes = [
        "Measured on the language's test pairs, the mean of both directions; NLL in nats per token. ± is the 95% "
        "confidence interval of the mean over seeds.",
    ]
    return Table("scores", "Scores of the language", headings, rows, notes)


def direction_table(results: Results) -> Table:
    labels = [label for case in cases(results.scale) for label in case.labels]
    return by_direction(results, [(label, label, [RULES[results.scale].language]) for label in labels])


def budget_table(results: Results) -> Table:
    """Returns the validation NLL of each model at its best, at equal tokens of the language, and at equal tokens."""
    rows: list[list[Value]] = []
    for case in cases(results.scale):
        budgets = {run.seed: Validations.read(run).best_tokens for run in results.runs_of(case.label(ALONE))}
        for model in case.models:
            finished = [Validations.read(run) for run in results.runs_of(case.label(model)) if run.seed in budgets]
            own = _at_budget([(run, budgets[run.run.seed] / run.share) for run in finished])
            everything = _at_budget([(run, budgets[run.run.seed]) for run in finished])
            share = statistics.fmean(run.share for run in finished) if finished else None
            best = mean_and_margin([run.best_nll for run in finished])
            rows.append([case.title, model, best, own, everything, share])
    headings = (
        "language and pairs", "model", "best validation", "equal tokens of the language", "equal tokens in all",
        "share of the language",
    )  # fmt: skip
    notes = [
        "Validation NLL of the language, measured. Equal tokens: as many as the bilingual run of that seed had seen at "
        "its best checkpoint, of the language alone (tokens x its computed share) or of all languages; the best "
        "validation of the language until then. A run that stopped improving before has its best. Not reached: a run "
        "had its largest number of steps before; in brackets the lowest share of those tokens that a run saw."
    ]
    return Table("budgets", "Three budgets", headings, rows, notes)


def _at_budget(found: Sequence[tuple[Validations, float]]) -> str | None:
    """Returns the mean NLL of the runs, each at its own number of tokens. If runs had their largest number of steps
    before, it returns the lowest share of those tokens that one of them saw."""
    shares = [
        int(run.run.record["tokens"]) / tokens
        for run, tokens in found
        if int(run.run.record["tokens"]) < tokens and not run.run.record.get("stopped_early")
    ]
    if shares:
        return f"not reached ({min(shares):.0%})"
    reached = [run.nll_at(tokens) for run, tokens in found]
    return mean_and_margin([nll for nll in reached if nll is not None])


def dose_response(results: Results) -> list[Picture]:
    """Returns NLL and chrF against the training pairs of the language: a line a model, intervals over seeds."""
    return [_dose_response(results, measure) for measure in ("test NLL", "chrF")] if results.runs else []


def _dose_response(results: Results, measure: str) -> Picture:
    metric, language = MEASURES[measure], RULES[results.scale].language
    columns: dict[str, list[tuple[int, list[float]]]] = {}
    copied: list[float] = []
    for case in cases(results.scale):
        for model, label in zip(case.models, case.labels, strict=True):
            if values := results.means(label, [language], metric):
                columns.setdefault(model, []).append((_train_pairs(results.runs_of(label)[0]), values))
                copied = copied or results.means(label, [language], replace(metric, copied=True))
    figure, axis = new_figure(f"training pairs of {language}", f"{measure} of {language}")
    draw_lines(axis, {model: sorted(with_margins(of_model)) for model, of_model in columns.items()})
    if copied:
        axis.axhline(copied[0], color=INK, linewidth=1, linestyle="--", label="copying the source")
    axis.set_xscale("log")
    ticks = sorted({pairs for of_model in columns.values() for pairs, _ in of_model})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    caption = f"{measure} against training pairs of {language}: mean and 95% interval over seeds (measured)."
    return Picture(f"{language}-{metric.name}", figure, caption, wide=False)


def _about(results: Results) -> list[str]:
    rule = RULES[results.scale]
    control = f"or with {', '.join(rule.unrelated)}, " if rule.unrelated else ""
    counts = ", ".join("all" if count is None else str(count) for count in rule.counts)
    return [
        f"One language cut to {counts} training pairs, drawn anew for each of {rule.seeds} seeds: {rule.language} "
        f"with its relatives {', '.join(rule.relatives)}, {control}{rule.pairs:,} pairs of each. Both "
        "directions are trained. All models of a language have one vocabulary, one split and one test text.",
        f"Every run validates every {rule.validate_every} steps and ends after {rule.patience} validations without "
        f"improvement, or after {rule.text.steps:,} steps of {rule.text.batch_tokens:,} tokens. Its best checkpoint is "
        f"scored. The bilingual models are tuned over {len(SETTINGS)} settings on validation text with seed 0; only "
        "the chosen one is scored. The multilingual models are not tuned.",
    ]


SWEEP = text_sweep(
    NAME,
    "Transfer to a low-resource language",
    _about,
    low_resource_members,
    verdicts,
    own_tables=(score_table, direction_table, budget_table),
    own_pictures=dose_response,
    tuned=lambda scale, cluster: [alone(case, cluster) for case in cases(scale)],
    scales=tuple(RULES),
)
