"""Records: a line of JSON a step."""

import json

from suite.training.jsonl import read_lines
from suite.training.trackers import MetricsFile


def test_a_line_a_step_at_once_on_disk_and_null_for_what_is_not_finite(tmp_path):
    tracker = MetricsFile(tmp_path / "metrics.jsonl", 0)
    tracker.log(1, {"train/loss": 2.5})
    tracker.log(2, {"train/loss": float("nan")})
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "train/loss": 2.5}\n{"step": 2, "train/loss": null}\n'
    tracker.finish({})


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "train/loss": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
    tracker = MetricsFile(path, 3)
    tracker.log(4, {"train/loss": 40.0})
    tracker.finish({})
    assert [line["train/loss"] for line in read_lines(path)] == [1, 2, 3, 40.0]
