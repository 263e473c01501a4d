"""What commands print: help, and Tables 1 to 3."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.record.gpipe import printed
from tests.record.job import Job


def help_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    yield Job("every command", help_pages)


def help_pages() -> dict[str, Any]:
    """Returns the help of each command that ``gpipe --help`` lists."""
    here = Path.cwd()
    first = printed(here, "--help")
    commands = re.findall(r"^│ ([a-z][a-z-]*) ", "\n".join(first), re.MULTILINE)
    return {"result": {"gpipe": first} | {name: printed(here, name, "--help") for name in commands}}


def table_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for name in ("1", "2", "3"):
        yield Job(f"Table {name}", table, (name,))


def table(name: str) -> dict[str, Any]:
    """Returns a table as its files have it; steps take the made-up times of their layers."""
    made_up_times()
    with tempfile.TemporaryDirectory() as folder:
        lines = printed(Path(folder), "table", name)
        pages = sorted(Path(folder).glob("runs/tables/*.md"))
        return {"result": {page.name: page.read_text().splitlines() for page in pages} or lines}


def made_up_times() -> None:
    """Replaces measurements: a step takes M times its slowest stage, a layer times that depend on its place."""
    from experiments.tables.table2 import Measurement
    from launch import tables
    from suite.pipeline.planning.costs import LayerCost

    def cost(forward_s: float, backward_s: float) -> LayerCost:
        return LayerCost(forward_s, forward_s, backward_s, **dict.fromkeys(SIZES, 0))

    def measured(work: Any, log: Any) -> Any:
        costs = tuple(cost(*seconds) for seconds in work.seconds)
        return Measurement((work.micro_batches * max(each.seconds for each in costs),), costs)

    def layer_costs(work: Any, log: Any) -> list[LayerCost]:
        return [cost(0.01 + 0.001 * (at % 7), 0.02 + 0.002 * (at % 7)) for at in range(len(work.build()[0]))]

    tables._measure_step, tables._costs = measured, layer_costs


SIZES = (
    "update_s", "parameters", "boundary_bytes", "gradient_bytes", "activation_bytes", "forward_peak_bytes",
    "graph_peak_bytes", "backward_peak_bytes", "update_peak_bytes",
)  # fmt: skip
"""Fields of a cost that do not matter to a speed."""
