"""Table 4 on available image sets: pretrain on one, replace the softmax layer, fine-tune on others.

    fashion --600 steps--> weights of all layers but the last --+--> mnist   five seeds, pretrained and from scratch
                                                                +--> digits  five seeds, pretrained and from scratch

A run differs from its baseline only in ``train.init_from``, and from runs of the same kind only in the seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from experiments.images.experiment import ImageExperiment
from experiments.images.runs import amoebanet_fashion
from experiments.report.page import Page, Section
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member, Report, Sweep, read_record

NAME = "transfer"

SETS = ("mnist", "digits")
SEEDS = range(5)
PRETRAINING = "fashion"
STARTS = ("pretrained", "scratch")


def transfer_runs(folder: Path) -> Iterator[Member]:
    """Yields all runs below a folder, the pretraining run first."""
    first = f"{NAME}/{PRETRAINING}"
    yield Member(first, PRETRAINING, amoebanet_fashion().model_copy(update={"name": NAME}), priority=1)
    for source in SETS:
        for start in STARTS:
            after, init_from = (first, str(folder / PRETRAINING)) if start == STARTS[0] else (None, None)
            for seed in SEEDS:
                name = f"{NAME}/{run_id(source, start, seed)}"
                yield Member(name, f"{source} {start}", fine_tuning(source, seed, init_from), after=after)


def run_id(source: str, start: str, seed: int) -> str:
    return f"{source}-{start}-{seed}"


def fine_tuning(source: str, seed: int, init_from: str | None) -> ImageExperiment:
    """Returns a short run on a small set of digits, without flips, which would change some digits."""
    run = amoebanet_fashion().with_settings(
        f"images.source={source} images.fit=resize images.flip=false images.cutout=8 model.classes=10 "
        "optimizer.warmup_steps=10 optimizer.lr_decay_steps=30 "
        f"train.steps=40 train.checkpoint_every=40 train.seed={seed}"
    )
    train = run.train.model_copy(update={"init_from": init_from})  # a path may have spaces
    return run.model_copy(update={"name": NAME, "train": train})


def transfer_table(runs: Path) -> Table:
    """Returns Table 4: the results of the sweep's finished runs, then the paper's rows."""
    rows: list[list[Value]] = [_row(runs / NAME, source) for source in SETS]
    numbers = paper_numbers("table4")
    rows += [
        [name, train, test, classes, None, None, None, None, None, None, accuracy, previous]
        for name, train, test, classes, accuracy, previous in numbers["rows"]
    ]
    headings = (
        "set", "train", "test", "classes", "runs", "fine-tuned % (measured)", "deviation", "from scratch % (measured)",
        "deviation", "gain", "accuracy % (paper)", "best before % (paper)",
    )  # fmt: skip
    return Table(
        "table-4", "Table 4: the gain from pretraining", headings, rows, [*_notes(runs / NAME), numbers["note"]]
    )


def _row(folder: Path, source: str) -> list[Value]:
    groups = [
        [record for seed in SEEDS if (record := read_record(folder / run_id(source, start, seed)))] for start in STARTS
    ]
    accuracies = [[100 * float(record["valid_accuracy"]) for record in records] for records in groups]
    tuned, scratch = (statistics.fmean(values) if values else None for values in accuracies)
    deviations = [statistics.stdev(values) if len(values) > 1 else None for values in accuracies]
    counts: dict[str, int] = next((record.get("counts", {}) for records in groups for record in records), {})
    return [
        source, counts.get("train"), counts.get("test"), 10, " and ".join(str(len(values)) for values in groups),
        tuned, deviations[0], scratch, deviations[1],
        tuned - scratch if tuned is not None and scratch is not None else None, None, None,
    ]  # fmt: skip


def _notes(folder: Path) -> list[str]:
    pretrained = read_record(folder / PRETRAINING)
    if not pretrained:
        return [f"No run of the sweep is finished yet: {command('sweep', NAME='transfer')}."]
    run = fine_tuning(SETS[0], 0, None)
    return [
        f"AmoebaNet-D({run.model.layers}, {run.model.filters}) over {run.pipeline.stages} stages. Pretrained on "
        f"Fashion-MNIST for {pretrained['steps']} steps ({100 * pretrained['valid_accuracy']:.1f}% there); then "
        f"{run.train.steps} steps of {run.train.batch_images} images with a new softmax, shifted crops and cutout. "
        "From scratch is the same without pretraining. Means and standard deviations over seeds.",
    ]


def _report(scale: str, cluster: Cluster, runs: Path) -> Report:
    tables = [transfer_table(runs)]
    return Report(Page("The gain from pretraining", [Section("Scores", tables=tables)]), tables)


SWEEP = Sweep(NAME, lambda scale, cluster, runs: list(transfer_runs(runs / NAME)), _report)
