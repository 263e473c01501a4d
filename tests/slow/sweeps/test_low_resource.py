"""The low-resource sweep from the command line: tuning first, then the runs that follow from it, and a report."""

from __future__ import annotations

import json

from tests.launch.train.test_end_to_end import gpipe


def test_tuning_its_followers_and_the_report_come_from_one_command(tmp_path):
    printed = gpipe(tmp_path, "sweep", "low_resource", "--scale", "tiny")
    assert "0 of 18 members are already finished" in printed
    assert (
        "16 of 20 members are already finished" in printed
    )  # the chosen two of seed 0 lack scores, those of seed 1 all
    folders = sorted((tmp_path / "runs/low_resource-tiny").glob("nl-*"))
    assert len(folders) == 20
    alone = [folder for folder in folders if "-alone-" in folder.name and folder.name.endswith("-0")]
    assert len(alone) == 10
    best = {}
    for folder in alone:
        record = json.loads((folder / "record.json").read_text())
        best.setdefault(folder.name.split("-alone")[0], {})[folder] = record["best_valid_nll"]
    for values in best.values():
        scored = [folder for folder in values if (folder / "scores.json").exists()]
        assert scored == [min(values, key=values.get)]  # the others' test pairs were never translated
    page = (tmp_path / "runs/low_resource-tiny/report.md").read_text()
    assert "A smoke test:" in page
    assert "excluded from" not in page
    assert "| copying the source |" in page

    again = gpipe(tmp_path, "sweep", "low_resource", "--scale", "tiny")
    assert "20 of 20 members are already finished" in again
    assert "started" not in again
