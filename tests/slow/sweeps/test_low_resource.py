"""The low-resource sweep from the command line: tuning first, interrupted and continued, then the runs that follow from
it, and a report."""

from __future__ import annotations

import json
import signal

from tests.launch.command_line import command, gpipe
from tests.slow.running import Running

SWEEP = "sweep", "low_resource", "--scale", "tiny"


def test_tuning_its_followers_and_the_report_survive_an_interrupt(tmp_path, ended):
    first, records = ended(Running(tmp_path, command(*SWEEP))), "runs/low_resource-tiny/*/record.json"
    first.until(lambda: list(tmp_path.glob(records)))
    first.process.send_signal(signal.SIGINT)
    first.wait(60, code=130)
    finished = {record: record.read_text() for record in tmp_path.glob(records)}
    assert "0 of 18 members are already finished" in first.printed
    assert "interrupted; gpipe sweep low_resource --scale tiny continues with the unfinished members" in first.printed
    assert all("-alone-" in record.parent.name and record.parent.name.endswith("-0") for record in finished)  # tuning
    printed = gpipe(tmp_path, *SWEEP, timeout_s=1800)
    assert f"{len(finished)} of 18 members are already finished" in printed
    assert all(record.read_text() == text for record, text in finished.items())  # they did not train again
    assert "16 of 20 members are already finished" in printed  # the best two of seed 0 lack scores, those of seed 1 all
    folders = sorted((tmp_path / "runs/low_resource-tiny").glob("nl-*-[01]"))
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

    again = gpipe(tmp_path, *SWEEP)
    assert "20 of 20 members are already finished" in again
    assert "started" not in again
