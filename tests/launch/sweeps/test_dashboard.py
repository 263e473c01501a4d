"""The progress display of a sweep."""

import io
import json

from rich.console import Console

from launch.runs.store import RunFolder
from launch.sweeps import dashboard
from launch.sweeps.dashboard import SweepProgress


def show(console, folder):
    """Shows a run in training while another task waits; returns what is printed."""
    with SweepProgress(console, 2) as progress:
        progress.begin("train a", RunFolder(folder), 10)
        (folder / "metrics.jsonl").write_text(
            json.dumps({"step": 3, "train/loss": 1.5}) + "\n" + json.dumps({"step": 3, "valid/nll": 2.0}) + "\n"
        )
        progress.poll("1 of 2 devices are free; train b needs 2")
        progress.refresh()
        progress.end("train a")
    return console.file.getvalue()


def test_a_terminal_shows_a_bar_for_the_sweep_and_one_for_each_run(tmp_path):
    printed = show(Console(file=io.StringIO(), force_terminal=True, width=150, color_system=None), tmp_path)
    for part in ("sweep", "train a", "3/10", "loss 1.500", "1 of 2 devices are free; train b needs 2", "1/2"):
        assert part in printed


def test_without_a_terminal_a_line_is_printed_every_interval(tmp_path, monkeypatch):
    monkeypatch.setattr(dashboard, "INTERVAL_S", -1.0)
    printed = show(Console(file=io.StringIO(), width=150), tmp_path)
    assert "0 of 2 done; train a step 3/10 loss 1.500; 1 of 2 devices are free; train b needs 2" in printed
