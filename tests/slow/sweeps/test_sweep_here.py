"""A sweep on one machine from the command line: training, scoring and report, with one member that cannot run."""

from __future__ import annotations

import json

from tests.launch.command_line import gpipe


def test_a_failed_member_is_reported_and_run_by_the_next_sweep(tmp_path):
    broken = tmp_path / "runs/temperature-tiny/t12_400m-T100-0"
    broken.parent.mkdir(parents=True)
    broken.write_text("in the way")
    printed = gpipe(tmp_path, "sweep", "temperature", "--scale", "tiny", code=1, timeout_s=900)
    assert "train temperature-tiny/t12_400m-T100-0 failed: " in printed
    assert "Traceback" not in printed
    assert "report: runs/temperature-tiny/report.html" in printed
    for folder in ("depth_width-tiny/t12_400m-0", "temperature-tiny/t12_400m-T1-0"):
        run = tmp_path / "runs" / folder
        scores, record = (json.loads((run / name).read_text()) for name in ("scores.json", "record.json"))
        assert (scores["step"], scores["beam"], scores["max_pairs"]) == (record["best_step"], 1, 3)
    page = (tmp_path / "runs/temperature-tiny/report.md").read_text()
    assert "excluded from all numbers: temperature-tiny/t12_400m-T100-0." in page
    assert "| temperature-tiny/t12_400m-T1-0 |" in page

    broken.unlink()
    printed = gpipe(tmp_path, "sweep", "temperature", "--scale", "tiny", timeout_s=900)
    assert "2 of 3 members are already finished" in printed
    assert "train temperature-tiny/t12_400m-T1-0" not in printed
    assert "excluded from" not in (tmp_path / "runs/temperature-tiny/report.md").read_text()
