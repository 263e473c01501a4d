"""``make list``: the experiments by name, with the paper's numbers."""

from __future__ import annotations

from rich.table import Table

from experiments.registry import experiments
from suite.pipeline.layers import count_parameters


def table() -> Table:
    """Returns one row an experiment."""
    rows = Table(title="experiments (the paper's numbers, where it has some)", title_justify="left")
    for heading in ("name", "layers", "parameters", "K", "R", "M", "batch", "data", "what it is"):
        rows.add_column(heading, justify="left" if heading in ("name", "data", "what it is") else "right")
    for name, make in experiments().items():
        run = make()
        layers, _ = run.build()
        what = (make.__doc__ or "").split("\n")[0]
        rows.add_row(
            name, str(len(layers)), f"{count_parameters(layers):,}", str(run.pipeline.stages),
            str(run.pipeline.replicas), str(run.pipeline.micro_batches), f"{run.batch:,} {run.unit}", run.data, what,
        )  # fmt: skip
    return rows
