"""A sweep as a person makes it on one machine, at the scale that is made for this: trained, scored and reported in
processes of its own, with one member that cannot be run."""

from __future__ import annotations

import json

from tests.launch.train.test_end_to_end import gpipe


def test_a_sweep_reports_the_rest_where_a_member_fails_and_then_runs_what_is_left(tmp_path):
    broken = tmp_path / "runs/bilingual-tiny/es-0"
    broken.parent.mkdir(parents=True)
    broken.write_text("where the folder of a run should be")
    said = gpipe(tmp_path, "sweep", "bilingual", "--scale", "tiny", code=1)
    assert "train bilingual-tiny/es-0 failed: " in said
    assert "Traceback" not in said
    assert "report: runs/bilingual-tiny/report.html" in said
    for folder in ("depth_width-tiny/t12_400m-0", "bilingual-tiny/de-0"):
        scores = json.loads((tmp_path / "runs" / folder / "scores.json").read_text())
        assert (scores["step"], scores["beam"], scores["max_pairs"]) == (4, 1, 3)
    page = (tmp_path / "runs/bilingual-tiny/report.md").read_text()
    assert "excluded from all numbers: bilingual-tiny/es-0." in page
    assert "| bilingual-tiny/de-0 |" in page

    broken.unlink()
    said = gpipe(tmp_path, "sweep", "bilingual", "--scale", "tiny")
    assert "2 of 3 members are already finished" in said
    assert "train bilingual-tiny/de-0" not in said
    assert "left out" not in (tmp_path / "runs/bilingual-tiny/report.md").read_text()
