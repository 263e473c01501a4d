"""Batch size, the paper's Table 5: one German-English model, mini-batches of 260K : 1M : 4M, in two comparisons.

equal steps    260K  1M  4M    as many updates: a larger batch sees more text
equal tokens   260K  1M  4M    as much text: a larger batch makes fewer updates (one batch is the same run)
"""

from __future__ import annotations

from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member
from experiments.sweeps.members.scales import RULES
from experiments.sweeps.multilingual import baseline, member, seeds
from experiments.sweeps.report.results import Metric, Results
from experiments.sweeps.report.verdicts import Verdict, compare
from experiments.sweeps.text_base import text_sweep
from experiments.translation.experiment import TranslationExperiment
from suite.data.text.tokenizer import ENGLISH
from suite.evaluation.scores import MEASURES

NAME, LANGUAGE = "batch_size", "de"
KINDS = EQUAL_STEPS, EQUAL_TOKENS = "equal steps", "equal tokens"


def label(share: float, kind: str) -> str:
    return f"batch x {share:g}, {kind}"


def batch_run(run: TranslationExperiment, share: float, kind: str) -> TranslationExperiment:
    """Returns a run with ``share`` of its batch; for equal tokens its steps, warm-up and decay are divided by that.

    Its budget is what is compared, so it never stops early; its best checkpoint is scored.
    """
    factor = 1.0 if kind == EQUAL_STEPS else 1 / share

    def steps(count: int) -> int:
        return max(1, round(count * factor))

    train, optimizer = run.train, run.optimizer
    every = "none" if train.validate_every is None else steps(train.validate_every)
    return run.with_settings(
        f"train.batch_tokens={max(16, round(train.batch_tokens * share))} train.steps={steps(train.steps)} "
        f"train.checkpoint_every={steps(train.checkpoint_every)} train.validate_every={every} train.patience=none "
        f"optimizer.warmup_steps={steps(optimizer.warmup_steps)} "
        f"optimizer.lr_decay_steps={steps(optimizer.lr_decay_steps)}"
    )


def _members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    members = []
    for seed in seeds(scale):
        for kind in KINDS:
            for share in RULES[scale].batches:
                run = batch_run(baseline(LANGUAGE, scale, cluster, seed), share, kind)
                name = f"{run.train.batch_tokens}-tokens-{run.train.steps}-steps"
                members.append(member(NAME, scale, name, seed, label(share, kind), run))
    return members


def larger_batches(results: Results) -> list[Verdict]:
    """The largest batch against the smallest, from German, by the NLL of the references and by chrF."""
    small, _, large = RULES[results.scale].batches
    # one batch has one run under two labels
    distinct = {tuple(run.member.folder for run in results.runs_of(name)): name for name in results.labels}.values()
    verdicts = []
    for kind in KINDS:
        found = compare(results, label(large, kind), label(small, kind), [LANGUAGE], distinct, into_english=True)
        finding = f"larger batches are better, at {kind}: the largest against the smallest"
        paper = "BLEU 30.92, 31.86, 32.71 and NLL 2.58, 2.51, 2.46 at 260K, 1M, 4M tokens"
        verdicts.append(Verdict(finding, paper, ((f"{LANGUAGE} to {ENGLISH}", found),), found.outcome))
    return verdicts


def batch_table(results: Results) -> Table:
    """Returns Table 5: German to English by batch size, beside the paper's."""
    numbers, shares = paper_numbers("table5"), RULES[results.scale].batches
    rows: list[list[Value]] = []
    for share, size, bleu, nll in zip(shares, numbers["batch_tokens"], numbers["bleu"], numbers["nll"], strict=True):
        here = next((run.member.experiment.batch for run in results.runs_of(label(share, EQUAL_STEPS))), None)
        rows.append([size, here, *(cell for kind in KINDS for cell in _cells(results, label(share, kind))), bleu, nll])
    # the scores of the source itself are the same for all runs, and have no NLL
    copied = [None, None, *_scores(results, next(iter(results.labels), ""), copied=True)]
    rows.append(["copying the source", None, *copied, *copied, None, None])
    measured = [f"{column}, {kind}" for kind in KINDS for column in ("steps", "tokens", *MEASURES.values())]
    headings = ["batch (paper)", "batch (here)", *measured, "BLEU (paper)", "NLL (paper)"]
    notes = [
        "Measured, except for the paper's columns. Batches in target tokens; scores of the best checkpoint's "
        "translations from German, NLL in nats per token; ± is the 95% confidence interval of the mean over seeds.",
        numbers["note"],
    ]
    title = f"Table 5: batch size, German to English, scale {results.scale}"
    return Table(f"table-5-{results.scale}", title, headings, rows, notes)


def _cells(results: Results, name: str) -> list[Value]:
    record = next((run.record for run in results.runs_of(name)), {})
    return [record.get("steps"), record.get("tokens"), *_scores(results, name)]


def _scores(results: Results, name: str, copied: bool = False) -> list[str | None]:
    metrics = (Metric(each, copied=copied, into_english=True) for each in MEASURES)
    return [results.shown(name, [LANGUAGE], metric) for metric in metrics]


SWEEP = text_sweep(
    NAME,
    "Batch size",
    "One bilingual German-English model, three mini-batches in the paper's ratios 260K : 1M : 4M; learning rate, "
    "update, text and seeds are equal. Warm-up and decay take the same share of the steps. The best checkpoint by "
    "validation is scored; no run stops early, because the budget is what is compared.",
    _members,
    larger_batches,
    own_tables=(batch_table,),
)
