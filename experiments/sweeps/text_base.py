"""A sweep on text, and its report: verdicts, then the paper's figure, tables, loss curves, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.page import Picture, Section
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.tuning import Baseline, tuning_table
from experiments.sweeps.report.figures import against_bilingual, by_third_pictures, loss_curves
from experiments.sweeps.report.results import Results, read_results
from experiments.sweeps.report.score_tables import by_direction, by_language, by_model, by_third, compared_models
from experiments.sweeps.report.verdicts import FEWEST_FOR_A_CLAIM, LEVEL, Comparison, Verdict
from experiments.sweeps.sweep import Sweep


def text_sweep(
    name: str,
    title: str,
    about: str | Callable[[Results], list[str]],
    members: Callable[[str, Cluster, Path], list[Member]],
    judge: Callable[[Results], list[Verdict]] = lambda results: [],
    own_tables: Sequence[Callable[[Results], Table]] = (),
    own_pictures: Callable[[Results], list[Picture]] = lambda results: [],
    others: Callable[[str, Cluster, Path], list[Member]] = lambda scale, cluster, runs: [],
    tuned: Callable[[str, Cluster], list[Baseline]] = lambda scale, cluster: [],
    scales: tuple[str, ...] = ("laptop", "tiny", "paper"),
) -> Sweep:
    """Returns a sweep on text. ``about`` says what is compared and what is equal; ``others`` are runs of another sweep
    that the report shows if they are finished; ``tuned`` are the tuned baselines."""

    def contents(results: Results, cluster: Cluster) -> tuple[list[Section], list[Table]]:
        beside = [member for member in others(results.scale, cluster, results.folder) if member.scoring is not None]
        of_others = read_results(results.scale, beside, results.folder)
        results = replace(results, runs=results.runs + of_others.runs)
        baselines = tuned(results.scale, cluster)
        untuned = ", ".join(each.title for each in baselines if each.chosen(results.folder) is None)
        what = [about, _shrinking(results)] if isinstance(about, str) else about(results)
        missing = ", ".join(dict.fromkeys(member.folder for member in results.missing))
        sentences = [*what, *still_improving(results)]
        sentences += [f"Not finished or not scored, and excluded from all numbers: {missing}."] if missing else []
        sentences += [f"Not tuned yet, and excluded from all numbers: {untuned}."] if untuned else []
        findings_table = verdict_table(judge(results))
        shown, details, pictures = [make(results) for make in own_tables], [], own_pictures(results)
        if results.multilingual_labels:
            shown.append(by_third(results))
            details = [by_model(results), by_language(results), by_direction(results, compared_models(results))]
            pictures = [*by_third_pictures(results), *against_bilingual(results), *pictures]
        sections = [
            Section("What was compared", sentences),
            Section("Findings", tables=[findings_table]),
            Section("Scores", tables=[*shown, *details], pictures=pictures),
            Section("Tuning", tables=[tuning_table(baselines, results.folder)] if baselines else []),
            Section("Losses", pictures=loss_curves(results)),
            Section("Runs", tables=[_runs_table(results)], sentences=_signatures(results)),
        ]
        return sections, [findings_table, *shown]

    return Sweep(name, title, members, contents, scales)


def _shrinking(results: Results) -> str:
    """Returns how the scale changed the paper's runs, from their records."""
    if not results.runs:
        return "No member of this sweep is finished and scored yet."
    run = results.runs[0]
    shrunk = run.record["shrunk"]
    count = len({each.member.folder for each in results.runs})  # a run with two labels counts once
    text = f"{count} runs are finished and scored, on {run.record['data']}"
    return f"{text}. Changed from the paper's {run.record['name']}: {', '.join(shrunk)}." if shrunk else f"{text}."


def verdict_table(verdicts: list[Verdict]) -> Table:
    """Returns a row for each comparison of each finding."""
    rows: list[list[Value]] = []
    for verdict in verdicts:
        first: list[Value] = [verdict.finding, verdict.paper, verdict.outcome]
        cells = [[where, *_cells(found)] for where, found in verdict.parts] or [["", None, None, None]]
        rows += [[*(first if at == 0 else [""] * 3), *each] for at, each in enumerate(cells)]
    headings = ("finding", "in the paper", "verdict", "where", "nats a token saved", "chrF gained", "seeds that agree")
    return Table(
        "findings",
        "The paper's findings, here",
        headings,
        rows or [["this sweep tests none of them", *[""] * (len(headings) - 1)]],
        [
            f"Findings tested: {len(verdicts)}. ± is the margin for the variation between seeds at 95%: t * s * "
            "sqrt(1/a + 1/b) for means over a and b seeds, s pooled over all models compared.",
            "Confirmed: nats a token saved and chrF gained are both above their margins (in every third, if the "
            f"finding is about all), and chrF is higher with p < {LEVEL} for every seed, by a paired bootstrap over "
            "test pairs. Contradicted: one is below minus its margin, the other not above its own, and chrF is lower "
            "with the same p (in one third, if the finding is about all). Undecided: anything else, all with one seed "
            f"or a missing one, and all with fewer than {FEWEST_FOR_A_CLAIM} test pairs in total over the languages "
            "compared. Nothing is corrected for the number of findings. A seed agrees if its chrF difference has the "
            f"sign of the mean and p < {LEVEL}. A third marked - does not count for the verdict.",
        ],
    )


def _cells(found: Comparison) -> list[Value]:
    agree = f"{found.clear_seeds} of {found.seeds}" if found.tests else None
    if found.pairs < FEWEST_FOR_A_CLAIM:
        agree = f"{agree or '-'}; {found.pairs} test pairs are too few for a claim"
    return [*(None if gain is None else str(gain) for gain in (found.nll, found.chrf)), agree]


def still_improving(results: Results) -> list[str]:
    """Returns a sentence with the labels of runs whose last validation was the best: they could still improve."""
    runs = {run.folder: run for run in results.runs}.values()  # one with two labels counts once
    at_last = (run for run in runs if run.record.get("best_step") == run.member.experiment.train.steps)
    counts = Counter(run.member.label for run in at_last)
    listed = "; ".join(f"{label} ({count} of {len(results.runs_of(label))} runs)" for label, count in counts.items())
    sentence = f"Best at the largest number of steps, so more steps could improve them further: {listed}."
    return [sentence] if counts else []


def _runs_table(results: Results) -> Table:
    rows: list[list[Value]] = [
        [
            run.member.folder, run.member.label, run.record["K"], run.record["steps"], run.record.get("best_step"),
            run.record["tokens"],
            run.record["seconds"], run.record["tokens_per_second"], run.record["loss_last"],
            run.record.get("best_valid_nll") or run.record["valid_nll"],
            run.scores["seconds"], run.scores["sentences_per_second"],
        ]
        for run in results.runs
    ]  # fmt: skip
    headings = (
        "run", "what", "K", "steps", "best step", "tokens", "training s", "tokens/s", "last loss",
        "best validation NLL", "decoding s", "sentences/s",
    )  # fmt: skip
    return Table("runs", "All runs (measured)", headings, rows or [[None] * len(headings)], [])


def _signatures(results: Results) -> list[str]:
    if not results.runs:
        return []
    scores = results.runs[0].scores
    pairs = "all pairs" if scores["max_pairs"] is None else f"{scores['max_pairs']} pairs per direction at most"
    pairs += f", none with more than {results.runs[0].experiment.text.max_length} tokens per side"
    signed = "; ".join(f"{name}: {signature}" for name, signature in scores["signatures"].items())
    penalty = scores["length_penalty"]
    return [f"Beam {scores['beam']}, length penalty {penalty:g}, the {scores['split']} split, {pairs}. {signed}."]
