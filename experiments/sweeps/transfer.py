"""Table 4 on available image sets: pretrain on one, replace the softmax layer, fine-tune on others.

    fashion --600 steps--> weights of all layers but the last --+--> mnist   five seeds, pretrained and from scratch
                                                                +--> digits  five seeds, pretrained and from scratch

A run differs from its baseline only in ``train.init_from``, and from runs of the same kind only in the seed.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from experiments.images.experiment import ImageExperiment
from experiments.images.runs import amoebanet_fashion
from experiments.report.page import Section
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member
from experiments.sweeps.report.results import Results
from experiments.sweeps.sweep import Sweep

NAME = "transfer"

SETS = ("mnist", "digits")
SEEDS = range(5)
PRETRAINING = "fashion"
STARTS = ("pretrained", "scratch")


def transfer_members(scale: str, cluster: Cluster, runs: Path) -> list[Member]:
    """Returns all runs, the pretraining run first."""
    first, found = f"{NAME}/{PRETRAINING}", [Member(f"{NAME}/{PRETRAINING}", PRETRAINING, pretraining(), priority=1)]
    for source in SETS:
        for start in STARTS:
            after, init_from = (first, str(runs / first)) if start == STARTS[0] else (None, None)
            for seed in SEEDS:
                name = f"{NAME}/{source}-{start}-{seed}"
                found.append(Member(name, f"{source} {start}", fine_tuning(source, seed, init_from), after=after))
    return found


def pretraining() -> ImageExperiment:
    return amoebanet_fashion().model_copy(update={"name": NAME})


def fine_tuning(source: str, seed: int, init_from: str | None) -> ImageExperiment:
    """Returns a short run on a small set of digits, without flips, which would change some digits."""
    run = pretraining().with_settings(
        f"images.source={source} images.fit=resize images.flip=false images.cutout=8 model.classes=10 "
        "optimizer.warmup_steps=10 optimizer.lr_decay_steps=30 "
        f"train.steps=40 train.checkpoint_every=40 train.seed={seed}"
    )
    return run.with_section("train", init_from=init_from)  # a path may have spaces


def transfer_table(results: Results) -> Table:
    """Returns Table 4: the results of the sweep's finished runs, then the paper's rows."""
    rows: list[list[Value]] = [_row(results, source) for source in SETS]
    numbers = paper_numbers("table4")
    rows += [
        [name, train, test, classes, None, None, None, None, None, None, accuracy, previous]
        for name, train, test, classes, accuracy, previous in numbers["rows"]
    ]
    headings = (
        "set", "train", "test", "classes", "runs", "fine-tuned % (measured)", "deviation", "from scratch % (measured)",
        "deviation", "gain", "accuracy % (paper)", "best before % (paper)",
    )  # fmt: skip
    title = "Table 4: the gain from pretraining"
    return Table("table-4", title, headings, rows, [*_notes(results), numbers["note"]])


def _row(results: Results, source: str) -> list[Value]:
    groups = [[run.record for run in results.runs_of(f"{source} {start}")] for start in STARTS]
    accuracies = [[100 * float(record["valid_accuracy"]) for record in records] for records in groups]
    tuned, scratch = (statistics.fmean(values) if values else None for values in accuracies)
    deviations = [statistics.stdev(values) if len(values) > 1 else None for values in accuracies]
    counts: dict[str, int] = next((record.get("counts", {}) for records in groups for record in records), {})
    return [
        source, counts.get("train"), counts.get("test"), 10, " and ".join(str(len(values)) for values in groups),
        tuned, deviations[0], scratch, deviations[1],
        tuned - scratch if tuned is not None and scratch is not None else None, None, None,
    ]  # fmt: skip


def _notes(results: Results) -> list[str]:
    pretrained = results.runs_of(PRETRAINING)
    if not pretrained:
        return [f"No run of the sweep is finished yet: {command('sweep', NAME='transfer')}."]
    run, record = fine_tuning(SETS[0], 0, None), pretrained[0].record
    return [
        f"AmoebaNet-D({run.model.layers}, {run.model.filters}) over {run.pipeline.stages} stages. Pretrained on "
        f"Fashion-MNIST for {record['steps']} steps ({100 * record['valid_accuracy']:.1f}% there); then "
        f"{run.train.steps} steps of {run.train.batch_images} images with a new softmax, shifted crops and cutout. "
        "From scratch is the same without pretraining. Means and standard deviations over seeds.",
    ]


def _contents(results: Results, cluster: Cluster) -> tuple[list[Section], list[Table]]:
    tables = [transfer_table(results)]
    return [Section("Scores", tables=tables)], tables


SWEEP = Sweep(NAME, "The gain from pretraining", transfer_members, _contents)
