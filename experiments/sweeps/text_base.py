"""A sweep on text, and its report: verdicts, scores, loss curves, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.page import Section
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.tuning import Baseline, tuning_table
from experiments.sweeps.report.figures import against_bilingual, loss_curves, score_pictures
from experiments.sweeps.report.results import Results, Run, read_results
from experiments.sweeps.report.score_tables import Group, by_language, score_table, thirds_and_all
from experiments.sweeps.report.verdicts import FEWEST_FOR_A_CLAIM, LEVEL, Comparison, Verdict
from experiments.sweeps.sweep import Sweep


def text_sweep(
    name: str,
    title: str,
    about: str | Callable[[Results], list[str]],
    members: Callable[[str, Cluster, Path], list[Member]],
    judge: Callable[[Results], list[Verdict]] = lambda results: [],
    groups_of: Callable[[Results], Iterable[Group]] = thirds_and_all,
    own_tables: Sequence[Callable[[Results], Table]] = (),
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
        groups = list(groups_of(results))
        shown = [make(results) for make in own_tables] + ([score_table(results, groups)] if groups else [])
        details = [by_language(results)] if results.languages else []
        pictures = [*score_pictures(results, groups), *against_bilingual(results)]
        sections = [
            Section("What was compared", sentences),
            Section("Findings", tables=[findings_table]),
            Section("Scores", tables=[*shown, *details], pictures=pictures),
            Section("Tuning", tables=[tuning_table(baselines, results.folder)] if baselines else []),
            Section("Losses", pictures=loss_curves(results)),
            *([Section("Runs", [_signatures(results)], [_runs_table(results)])] if results.runs else []),
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
    rows = [_run_cells(run) for run in results.runs]
    return Table("runs", "All runs (measured)", [*rows[0]], [[*row.values()] for row in rows], [])


def _run_cells(run: Run) -> dict[str, Value]:
    record, model = run.record, run.experiment.model
    return {
        "run": run.member.folder,
        "what": run.member.label,
        "model": f"T({model.blocks_per_stack}, {model.feed_forward}, {model.heads})",
        "parameters": record["parameters"],
        "K": record["K"],
        "steps": record["steps"],
        "best step": record.get("best_step"),
        "tokens": record["tokens"],
        "training s": record["seconds"],
        "tokens/s": record["tokens_per_second"],
        "last loss": record["loss_last"],
        "best validation NLL": record.get("best_valid_nll") or record["valid_nll"],
        "decoding s": run.scores["seconds"],
        "sentences/s": run.scores["sentences_per_second"],
    }


def _signatures(results: Results) -> str:
    scores = results.runs[0].scores
    pairs = "all pairs" if scores["max_pairs"] is None else f"{scores['max_pairs']} pairs per direction at most"
    pairs += f", none with more than {results.runs[0].experiment.text.max_length} tokens per side"
    signed = "; ".join(f"{name}: {signature}" for name, signature in scores["signatures"].items())
    penalty = scores["length_penalty"]
    return f"Beam {scores['beam']}, length penalty {penalty:g}, the {scores['split']} split, {pairs}. {signed}."
