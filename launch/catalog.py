"""What can be run: the experiments with their sizes in the paper (``make list``), tables and sweeps."""

from __future__ import annotations

from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.base.hints import command, option
from suite.errors import SuiteError

TABLES = {
    "1": "the largest models that fit into the memory of K devices",
    "2": "throughput by stages and micro-batches",
    "3": "throughput without fast links between devices",
    "4": "transfer learning on images, from runs of the sweep transfer",
    "5": "loss and BLEU by batch size, from runs of the sweep batch_size",
    "breakdown": "where the time of a step goes, from a run with a trace: RUN= or --run, by default the latest",
}
"""The tables that ``make table`` can make, by name."""


def tables() -> Table:
    rows = Table(option("NAME"), "what it shows", title=f"tables: {command('table', NAME='...')}", title_justify="left")
    for name, what in TABLES.items():
        rows.add_row(name, what)
    return rows


def sweeps() -> Table:
    from experiments.sweeps.registry import SWEEPS

    title = f"sweeps: {command('sweep', NAME='...')} (docs/sweeps.md)"
    rows = Table(option("NAME"), option("SCALE"), title=title, title_justify="left")
    for name, sweep in SWEEPS.items():
        rows.add_row(name, ", ".join(sweep.scales) or "only one: leave SCALE out")
    return rows


def experiments_table() -> Table:
    """Returns one row per experiment; the descriptions are in the caption, so that the rows fit 80 columns."""
    from experiments.registry import experiments
    from suite.pipeline.model.layers import count_parameters

    title = "experiments (with the paper's sizes, where it has them)"
    rows = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("name", "layers", "parameters", "K", "R", "M", "batch"):
        rows.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    descriptions = []
    for name, make in experiments().items():
        try:
            experiment = make()
            layers, _ = experiment.build()
        except SuiteError as error:  # of another package
            rows.add_row(name)
            descriptions.append(f"{name} cannot be used: {error}")
            continue
        pipeline = experiment.pipeline
        shape = len(layers), f"{count_parameters(layers):,}", pipeline.stages, pipeline.replicas, pipeline.micro_batches
        rows.add_row(name, *map(str, shape), f"{experiment.batch:,} {experiment.unit}")
        text = experiment.listed((make.__doc__ or "").split("\n")[0])
        descriptions.append(fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    rows.caption, rows.caption_justify = "\n".join(descriptions), "left"
    return rows
