"""``make list``: the experiments by name, with the paper's numbers; and what tables and sweeps there are."""

from __future__ import annotations

from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.registry import experiments
from experiments.sweeps import SWEEPS
from suite.pipeline.layers import count_parameters

TABLES = {
    "1": "the largest models that fit into the memory of K devices",
    "2": "throughput by stages and micro-batches",
    "3": "throughput without fast links between devices",
    "4": "transfer learning on images; of runs of the sweep transfer",
    "5": "loss and BLEU by batch size; of runs of the sweep batch_size",
    "partition": "stages cut by measured costs beside stages of equally many layers",
    "efficiency": "measured steps beside the fill-drain limit",
    "slow_links": "measured and simulated steps over links with delay and little bandwidth; needs root",
    "prediction": "predicted steps and memory beside measured ones",
    "breakdown": "where the time of a step goes; of a run with a trace: RUN=, otherwise the newest",
    "decoding": "decoding beside transformers' generate; of a trained run: RUN=",
}
"""What ``make table`` makes, by name."""


def tables() -> Table:
    """Returns one row a table."""
    rows = Table("NAME=", "what it shows", title="tables: make table NAME=...", title_justify="left")
    for name, what in TABLES.items():
        rows.add_row(name, what)
    return rows


def sweeps() -> Table:
    """Returns one row a sweep."""
    rows = Table("NAME=", "SCALE=", title="sweeps: make sweep NAME=... (docs/sweeps.md)", title_justify="left")
    for name, sweep in SWEEPS.items():
        rows.add_row(name, ", ".join(sweep.scales) or "it has one alone: leave SCALE out")
    return rows


WIDTH = 80
"""Columns of a terminal that the list is made for."""


def table() -> Table:
    """Returns one row an experiment; what each is stands below, so that the rows fit 80 columns."""
    rows = Table(
        title="experiments (the paper's numbers, where it has some)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("name", "layers", "parameters", "K", "R", "M", "batch"):
        rows.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    described = []
    for name, make in experiments().items():
        run = make()
        layers, _ = run.build()
        rows.add_row(
            name, str(len(layers)), f"{count_parameters(layers):,}", str(run.pipeline.stages),
            str(run.pipeline.replicas), str(run.pipeline.micro_batches), f"{run.batch:,} {run.unit}",
        )  # fmt: skip
        what = (make.__doc__ or "").split("\n")[0]
        text = f"{name} ({run.data}): {what}"
        described.append(fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    rows.caption, rows.caption_justify = "\n".join(described), "left"
    return rows
