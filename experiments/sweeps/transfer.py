"""Table 4 on available image sets: pretrain on one, replace the softmax layer, fine-tune on others.

    fashion --600 steps--> weights of all layers but the last --+--> mnist   five seeds, pretrained and from scratch
                                                                +--> digits  five seeds, pretrained and from scratch

A run differs from its baseline only in ``train.init_from``, and from runs of the same kind only in the seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments.base.cluster import Cluster
from experiments.base.hints import command
from experiments.images.experiment import ImageExperiment
from experiments.images.runs import amoebanet_fashion
from experiments.report.page import Page, Section
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, Value
from experiments.sweeps.members.base import Member, read_record
from suite.settings import ImageSettings, ImageTrainSettings, OptimizerSettings

NAME = "transfer"
"""Name of the sweep, and of its runs' folder."""

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
            pretrained = start == STARTS[0]
            init_from = str(folder / PRETRAINING) if pretrained else None
            for seed in SEEDS:
                yield Member(
                    f"{NAME}/{run_id(source, start, seed)}", f"{source} {start}", fine_tuning(source, seed, init_from),
                    after=first if pretrained else None,
                )  # fmt: skip


def run_id(source: str, start: str, seed: int) -> str:
    """Returns the name of one run's folder."""
    return f"{source}-{start}-{seed}"


def fine_tuning(source: str, seed: int, init_from: str | None) -> ImageExperiment:
    """Returns a short run on a small set of digits, without flips, which would change some digits."""
    base = amoebanet_fashion()
    steps = 40
    return base.model_copy(
        update={
            "name": NAME,
            "images": ImageSettings(source=source, size=base.images.size, fit="resize", crop="random_shift", cutout=8),
            "model": replace(base.model, classes=10),
            "optimizer": OptimizerSettings(
                learning_rate=3e-3, warmup_steps=10, lr_decay="cosine", lr_decay_steps=steps - 10, beta2=0.99
            ),
            "train": ImageTrainSettings(
                steps=steps, batch_images=base.train.batch_images, checkpoint_every=steps, seed=seed,
                init_from=init_from,
            ),
        }
    )  # fmt: skip


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
    groups = [_accuracies(folder, source, start) for start in STARTS]
    tuned, scratch = (statistics.fmean(values) if values else None for values in groups)
    deviations = [statistics.stdev(values) if len(values) > 1 else None for values in groups]
    counts = _counts(folder, source)
    return [
        source, counts.get("train"), counts.get("test"), 10, " and ".join(str(len(values)) for values in groups),
        tuned, deviations[0], scratch, deviations[1],
        tuned - scratch if tuned is not None and scratch is not None else None, None, None,
    ]  # fmt: skip


def _accuracies(folder: Path, source: str, start: str) -> list[float]:
    """Returns the test accuracies of the finished runs, in per cent."""
    records = (read_record(folder / run_id(source, start, seed)) for seed in SEEDS)
    return [100 * float(record["valid_accuracy"]) for record in records if record]


def _counts(folder: Path, source: str) -> dict[str, int]:
    record = next((r for s in STARTS for seed in SEEDS if (r := read_record(folder / run_id(source, s, seed)))), {})
    counts: dict[str, int] = record.get("counts", {})
    return counts


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


class Transfer:
    """The transfer sweep."""

    name = NAME
    scales: tuple[str, ...] = ()

    def members(self, scale: str, cluster: Cluster, runs: Path) -> list[Member]:
        """Returns the pretraining run, then all others."""
        return list(transfer_runs(runs / NAME))

    def page(self, scale: str, cluster: Cluster, runs: Path) -> Page:
        """Returns a page with one table."""
        return Page("The gain from pretraining", [Section("Scores", tables=self.tables(scale, cluster, runs))])

    def tables(self, scale: str, cluster: Cluster, runs: Path) -> list[Table]:
        """Table 4."""
        return [transfer_table(runs)]


SWEEP = Transfer()
