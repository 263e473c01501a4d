"""The tables and figures of the sweep ``low_resource``.

validation NLL of the language    validation pairs, at the run's best checkpoint: for tuning and for the three budgets
test NLL, chrF, BLEU              test pairs, mean of both directions; copying the source has a row of its own
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.report.figure import INK, new_figure
from experiments.report.page import Picture
from experiments.report.table import Table, Value
from experiments.sweeps.members.low_resource import Case, Model
from experiments.sweeps.report.labels import mean_and_margin
from experiments.sweeps.report.results import DISTINCT, PLAIN, Results, Run, scored_step
from experiments.sweeps.report.verdicts import Verdict, compare, t_margin
from suite.data.text.sampling import temperature_weights
from suite.training.jsonl import read_lines
from suite.training.metrics import STEP, units_done

NLL = "validation NLL"
TEST_NLL, CHRF, BLEU = "test NLL", "chrF", "BLEU"
PLAIN_CHRF = "chrF, no placeholders"
DISTINCT_NLL, DISTINCT_CHRF = "test NLL, no near-duplicates", "chrF, no near-duplicates"

_FIELDS = {
    TEST_NLL: ("nll", None), CHRF: ("chrf", None), BLEU: ("bleu", None), PLAIN_CHRF: ("chrf", PLAIN),
    DISTINCT_NLL: ("nll", DISTINCT), DISTINCT_CHRF: ("chrf", DISTINCT),
}  # fmt: skip
"""The measure and the part of the test pairs of each column."""


@dataclass(frozen=True)
class LowResourceRun:
    """A finished run, and its validations of the language: (tokens seen, NLL in nats per token)."""

    run: Run
    case: Case
    validations: tuple[tuple[int, float], ...]
    best: int
    """The place of the best checkpoint's validation."""

    @classmethod
    def read(cls, run: Run, case: Case) -> LowResourceRun:
        """Reads a run's validations."""
        lines, tokens, found, steps = read_lines(run.folder / "metrics.jsonl"), 0, [], []
        for line in lines:
            tokens = int(line.get(units_done("tokens"), tokens))
            if (nll := line.get(f"valid/nll/{case.group.language}")) is not None:
                found.append((tokens, float(nll)))
                steps.append(int(line[STEP]))
        return cls(run, case, tuple(found), steps.index(scored_step(run.record)))

    def value(self, measure: str, copied: bool = False) -> float | None:
        """Returns a measure, the mean of both directions; ``copied`` scores the source itself, which has no NLL."""
        if measure == NLL:
            return self.validations[self.best][1]
        return self.run.score(self.case.group.language, *_FIELDS[measure], copied)

    @property
    def share(self) -> float:
        """The share of its tokens that are of the language: its probability, computed."""
        text = self.run.member.experiment.model_dump()["text"]
        counts = dict(limit.split(":") for limit in text["train_pairs"] or ())
        own = next(int(scores["train_pairs"]) for scores in self.run.scores["directions"].values())
        others = [int(counts[code]) for code in text["languages"] if code != self.case.group.language]
        return float(temperature_weights([own, *others], text["temperature"])[0])

    @property
    def tokens(self) -> int:
        """Target tokens that it was trained on."""
        return int(self.run.record["tokens"])

    def nll_at(self, tokens: float) -> float | None:
        """Returns the best NLL of the language until so many tokens; None before the first validation."""
        return min((nll for at, nll in self.validations if at <= tokens), default=None)


Runs = Callable[[Case, Model], list[LowResourceRun]]
"""Returns the finished runs of a model, by seed."""


def read_runs(results: Results, cases: Sequence[Case]) -> Runs:
    """Reads the finished runs of all cases."""
    found = {
        (case, model): [LowResourceRun.read(run, case) for run in results.runs_of(case.label(model))]
        for case in cases
        for model in case.models
    }
    return lambda case, model: found[case, model]


PAPER = "one multilingual model beats bilingual ones, most on low-resource languages"


def verdicts(cases: Sequence[Case], results: Results) -> list[Verdict]:
    """Relatives against the tuned bilingual model, and against as many pairs of unrelated languages, if any."""
    found = []
    for case in cases:
        alone, relatives, *control = case.models
        found.append(_verdict(case, relatives, alone, "beats the tuned bilingual model", PAPER, results))
        for unrelated in control:
            what = "beats one with unrelated languages"
            found.append(_verdict(case, relatives, unrelated, what, "the paper does not test this", results))
    return found


def _verdict(case: Case, more: Model, less: Model, what: str, paper: str, results: Results) -> Verdict:
    labels = [case.label(model) for model in case.models]
    found = compare(results, case.label(more), case.label(less), [case.group.language], labels)
    finding = f"{case.title}: the multilingual model {what}"
    return Verdict(finding, paper, ((case.group.language, found),), found.outcome)


def _values(runs: Sequence[LowResourceRun], measure: str) -> list[float]:
    return [value for run in runs if (value := run.value(measure)) is not None]


def score_table(cases: Sequence[Case], runs_of: Runs) -> Table:
    """Returns one row per model of each case, and one for copying the source."""
    rows: list[list[Value]] = []
    measures = tuple(_FIELDS)
    for case in cases:
        scored = [run for model in case.models for run in runs_of(case, model)]
        for model in case.models:
            runs = runs_of(case, model)
            tokens = statistics.fmean(run.validations[run.best][0] for run in runs) if runs else None
            rows.append(
                [
                    case.title,
                    model.name,
                    len(runs),
                    *(mean_and_margin(_values(runs, each)) for each in measures),
                    tokens,
                ]
            )
        copied = [
            mean_and_margin([value for run in scored[:1] if (value := run.value(each, copied=True)) is not None])
            for each in measures
        ]
        rows.append([case.title, "copying the source", None, *copied, None])
    headings = ("language and pairs", "model", "seeds", *measures, "tokens at the best checkpoint")
    notes = [
        "Measured on the language's test pairs, the mean of both directions; NLL in nats per token. ± is the 95% "
        "confidence interval of the mean over seeds.",
    ]
    return Table("scores", "Scores of the language", headings, rows or [[None] * len(headings)], notes)


def budget_table(cases: Sequence[Case], runs_of: Runs) -> Table:
    """Returns the validation NLL of each model at its best, at equal tokens of the language, and at equal tokens."""
    rows: list[list[Value]] = []
    for case in cases:
        references = {run.run.seed: run.validations[run.best][0] for run in runs_of(case, case.models[0])}
        for model in case.models:
            runs = [run for run in runs_of(case, model) if run.run.seed in references]
            best = mean_and_margin(_values(runs, NLL))
            own = _at_budget(runs, [references[run.run.seed] / run.share for run in runs])
            everything = _at_budget(runs, [references[run.run.seed] for run in runs])
            share = statistics.fmean(run.share for run in runs) if runs else None
            rows.append([case.title, model.name, best, own, everything, share])
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
    return Table("budgets", "Three budgets", headings, rows or [[None] * len(headings)], notes)


def _at_budget(runs: Sequence[LowResourceRun], tokens: Sequence[float]) -> str | None:
    """Returns the mean NLL of the runs, each at its own budget. If runs had their largest number of steps before, it
    returns the lowest share of its budget that one of them saw."""
    shares = [
        run.tokens / budget
        for run, budget in zip(runs, tokens, strict=True)
        if run.tokens < budget and not run.run.record.get("stopped_early")
    ]
    if shares:
        return f"not reached ({min(shares):.0%})"
    found = [run.nll_at(budget) for run, budget in zip(runs, tokens, strict=True)]
    return mean_and_margin([value for value in found if value is not None])


def dose_response(cases: Sequence[Case], runs_of: Runs, measure: str) -> Picture | None:
    """Returns a measure against the training pairs of the language: a line a model, intervals over seeds."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    copied = []
    for case in cases:
        for model in case.models:
            runs = runs_of(case, model)
            if values := _values(runs, measure):
                pairs = next(int(scores["train_pairs"]) for scores in runs[0].run.scores["directions"].values())
                margin = t_margin(values)
                points.setdefault(model.name, []).append((pairs, statistics.fmean(values), margin))
                copied += [runs[0].value(measure, copied=True)]
    if not points:
        return None
    language = cases[0].group.language
    figure, axis = new_figure(f"training pairs of {language}", f"{measure} of {language}")
    for name, places in points.items():
        across, middle, margins = zip(*sorted(places), strict=True)
        axis.errorbar(across, middle, yerr=margins, marker="o", capsize=3, linewidth=1.4, label=name)
    if copied and copied[0] is not None:
        axis.axhline(copied[0], color=INK, linewidth=1, linestyle="--", label="copying the source")
    axis.set_xscale("log")
    ticks = sorted({pairs for places in points.values() for pairs, _, _ in places})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8)
    caption = f"{measure} against training pairs of {language}: mean and 95% interval over seeds (measured)."
    return Picture(f"{language}-{'nll' if measure == TEST_NLL else 'chrf'}", figure, caption, wide=False)
