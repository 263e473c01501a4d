"""The low-resource sweep from the command line: tuning first, interrupted and continued, then the runs that follow from
it, and a report."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from tests.launch.command_line import command, environment, gpipe


def interrupted_while_tuning(folder: Path) -> tuple[str, dict[Path, str]]:
    """Starts the sweep, interrupts it after the first finished member, and returns what it printed and the records."""
    sweep = command("sweep", "low_resource", "--scale", "tiny")
    with (folder / "printed").open("w") as log:
        process = subprocess.Popen(sweep, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + 600
        while not list(folder.glob("runs/low_resource-tiny/*/record.json")):
            assert process.poll() is None, (folder / "printed").read_text()
            assert time.monotonic() < end, (folder / "printed").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    records = folder.glob("runs/low_resource-tiny/*/record.json")
    return (folder / "printed").read_text(), {record: record.read_text() for record in records}


def test_tuning_its_followers_and_the_report_survive_an_interrupt(tmp_path):
    first, finished = interrupted_while_tuning(tmp_path)
    assert "0 of 18 members are already finished" in first
    assert "interrupted; gpipe sweep low_resource --scale tiny continues with the unfinished members" in first
    assert all("-alone-" in record.parent.name and record.parent.name.endswith("-0") for record in finished)  # tuning
    printed = gpipe(tmp_path, "sweep", "low_resource", "--scale", "tiny", timeout_s=1800)
    assert f"{len(finished)} of 18 members are already finished" in printed
    assert all(record.read_text() == text for record, text in finished.items())  # they did not train again
    assert (
        "16 of 20 members are already finished" in printed
    )  # the chosen two of seed 0 lack scores, those of seed 1 all
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

    again = gpipe(tmp_path, "sweep", "low_resource", "--scale", "tiny")
    assert "20 of 20 members are already finished" in again
    assert "started" not in again
