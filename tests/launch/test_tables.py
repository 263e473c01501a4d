"""What a table of speeds measures: a pipeline of sleeping layers, its stages alone and together."""

import os

from experiments.tables.table2 import SleepingWork
from launch import tables
from tests.suite.training.test_trace import write


def test_steps_of_a_pipeline_and_its_stages_alone_are_measured(tmp_path, monkeypatch):
    """Each of two stages sleeps 3 ms in a forward and 6 ms in a backward, for each of 4 micro-batches."""
    for name, value in (("FOLDER", tmp_path), ("FEWEST_STEPS", 2), ("SECONDS_A_CASE", 0.1)):
        monkeypatch.setattr(tables, name, value)
    said = []
    found = tables._measure_step(SleepingWork(((0.003, 0.006), (0.003, 0.006)), 4, 64), said.append)
    assert all(cost.forward_s >= 0.003 and cost.backward_s >= 0.006 for cost in found.stage_costs)
    assert len(found.stage_costs) == 2 <= len(found.seconds)
    assert min(found.seconds) >= 4 * (0.003 + 0.006)
    assert [text.partition(":")[0] for text in said] == ["K = 2, M = 4"] * 2


def test_the_newest_run_with_a_traced_step_is_shown(tmp_path, monkeypatch):
    """A run of two steps has a file of traces, without one."""
    monkeypatch.setattr(tables, "RUNS", tmp_path)
    for at, (name, steps) in enumerate((("traced", 12), ("newer", 2))):
        write(tmp_path / name / "1/trace", 1, 1, until=steps)
        os.utime(tmp_path / name / "1/trace", (at, at))
    assert tables._newest_traced().path == tmp_path / "traced/1"
