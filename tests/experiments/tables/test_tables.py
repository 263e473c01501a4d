"""The paper's tables: computed numbers are compared with arithmetic; the simulator replaces measurements."""

import csv
import io

import pytest

from experiments.planning.step_parts import PARTS, shares
from experiments.report.paper import paper_numbers
from experiments.report.table import Table, readable
from experiments.tables.breakdown import breakdown_table
from experiments.tables.table1 import transformer_table
from experiments.tables.table2 import (
    Measurement,
    SleepingWork,
    cell_seconds,
    closed_form,
    simulated_step,
    table_2,
    table_3,
)
from suite.pipeline.planning.costs import LayerCost
from suite.pipeline.schedule.timeline import Span, Timeline
from suite.training.trace import StepTrace


def silent(done: int, total: int, part: str) -> None:
    pass


def cost(forward, backward):
    return LayerCost(forward, forward, backward, 0.0, 1, 8, 8, 8, 8, 8, 8, 8)


def exact(work: SleepingWork) -> Measurement:
    """Measures what the simulator says, to the digit: the tables' arithmetic is then known."""
    alone = tuple(cost(forward, backward) for forward, backward in work.seconds)
    return Measurement((simulated_step(alone, work.micro_batches),) * 3, alone)


def column(table: Table, heading: str) -> list:
    return [row[list(table.headings).index(heading)] for row in table.rows]


def test_the_papers_rows_of_table_1_are_consistent():
    numbers = paper_numbers("table1.transformer")
    for parameters, gib in zip(numbers["parameters"], numbers["parameter_gib"], strict=True):
        assert parameters * numbers["bytes_per_parameter"] / 2**30 == pytest.approx(gib, rel=5e-3)


def test_table_1_fits_its_devices_and_no_larger_model_would():
    table = transformer_table(silent)
    fullest = column(table, "fullest device GiB (computed)")
    piped = [gib for name, gib in zip(column(table, "devices"), fullest, strict=True) if name != "Naive-1"]
    assert all(15 <= gib <= 16 for gib in piped)
    assert all(gib <= 16 for gib in fullest)
    largest = column(table, "largest L (computed)")
    assert largest[1:5] == sorted(largest[1:5])
    # a pipeline of 128 holds close to 16 times the blocks of one of 8
    assert largest[4] / largest[2] == pytest.approx(16, rel=0.02)
    assert all(less <= more for less, more in zip(largest[5:], largest[:5], strict=True))
    assert all(ours > paper for ours, paper in zip(largest[6:], column(table, "L (paper)")[6:], strict=True))


@pytest.mark.slow
def test_table_2_of_a_perfect_executor_is_the_closed_form():
    table = table_2(exact, silent)
    equal = [row for row in table.rows if row[2] == "equal"]
    speeds = {(row[0], row[1]): (row[6], row[8]) for row in equal}
    assert speeds[2, 1] == (1.0, 1.0)
    for measured, closed in speeds.values():
        assert measured == pytest.approx(closed, rel=0.01)
    assert speeds[8, 32][0] / speeds[2, 32][0] == pytest.approx(65 / 18.5, rel=0.01)
    assert f"measured {speeds[8, 32][0] / speeds[2, 32][0]:.3f}" in table.notes[0]
    cut = [row for row in table.rows if row[2] == "as cut"]
    assert [row[:2] for row in cut] == [[2, 32], [4, 32], [8, 32]]
    assert cut[-1][6] / cut[0][6] < 65 / 18.5  # whole layers do not divide evenly


@pytest.mark.slow
def test_table_3_has_a_slow_link_in_its_simulation():
    rows = [row for row in table_3(exact, silent).rows if row[2] == "equal"]
    assert [row[0] for row in rows] == [2, 4, 8]
    assert rows[0][9] == 1.0
    assert rows[2][7] < rows[2][8]  # simulated with the link below the closed form without


def test_cells_of_every_k_and_m_do_the_same_work():
    work = {}
    for stages, micro_batches in ((2, 1), (8, 32)):
        for cut in (False, True):
            seconds, _, slowed = cell_seconds(48, "TPUv3", stages, micro_batches, cut)
            assert len(seconds) == stages
            assert sum(forward for forward, _ in seconds) / stages == pytest.approx(0.040)
            work[stages, cut] = micro_batches * sum(forward for forward, _ in seconds) / slowed
    assert max(work.values()) == pytest.approx(min(work.values()), rel=1e-6)


def test_the_closed_form_of_the_mean_stage():
    assert closed_form([cost(0.5, 1.0), cost(1.5, 3.0)] * 4, 8) == 15 * 3 + 7


def step(*rows):
    return Timeline(tuple(tuple(Span(*span) for span in row) for row in rows))


def test_shares_of_a_step_by_hand():
    """Two stages, one micro-batch, F = 1, B = 2; the message to stage 1 takes 1; the update 1. 9 seconds in all."""
    timeline = step(
        [("F", 0, 0, 1), ("B", 0, 6, 8), ("U", -1, 8, 9)],
        [("F", 0, 2, 3), ("B", 0, 3, 5), ("U", -1, 8, 9)],
    )
    parts = shares(timeline)
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["compute"] == pytest.approx(6 / 18)
    assert parts["update"] == pytest.approx(2 / 18)
    assert parts["bubble"] == pytest.approx(6 / 18)  # even and instant: 6 seconds of which each stage works 3
    assert parts["imbalance"] == pytest.approx(0)
    assert parts["communication"] == pytest.approx(4 / 18)  # a second each way, in which both wait
    assert parts["recompute"] == 0


def test_imbalance_is_the_cost_of_a_heavier_stage():
    timeline = step(
        [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 1, 8, 9), ("B", 0, 11, 12)],
        [("F", 0, 1, 4), ("F", 1, 4, 7), ("B", 1, 7, 8), ("B", 0, 10, 11)],
    )
    parts = shares(timeline)
    assert parts["imbalance"] == pytest.approx(1 / 12)  # F 1 and 3 need 10 seconds, F 2 and 2 would need 9, of 12
    assert sum(parts.values()) == pytest.approx(1.0)
    table = breakdown_table("a/b", [StepTrace(0, 0, 0.0, timeline)], [3, 4])
    assert column(table, "part") == list(PARTS)
    assert sum(column(table, "share (measured)")) == pytest.approx(1.0)
    assert not any("MFU" in note for note in table.notes)
    noted = breakdown_table("a/b", [StepTrace(0, 0, 0.0, timeline)], [3, 4], mfu=0.25)
    assert any("MFU of the run 25.0% = compute 50.0% x 50.0%" in note for note in noted.notes)  # busy 12 of 24 seconds


def test_a_table_is_rounded_in_markdown_and_exact_in_csv(tmp_path):
    table = Table("t", "Title", ("what", "number"), [["a", 1234.5678], ["b", None]], ["a note"])
    markdown, raw = (path.read_text() for path in table.write(tmp_path))
    assert "| a | 1,235 |" in markdown
    assert "- a note" in markdown
    assert list(csv.reader(io.StringIO(raw)))[1] == ["a", "1234.5678"]
    assert [readable(value) for value in (None, "x", 12345, 0.98765, 3)] == ["-", "x", "12,345", "0.9877", "3"]
