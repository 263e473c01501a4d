"""Small files of a run that a power cut left empty or broken: other runs are not affected, and the file is named."""

import io
import json
import os
import re

import pytest
from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.registry import find
from experiments.sweeps.registry import SWEEPS
from launch.runs.store import RUNS, RunFolder, run_lock
from launch.sweeps.command import report
from launch.sweeps.tasks import tasks_of
from launch.watching import run_listing
from launch.watching.run_listing import print_runs
from tests.launch.command_line import call, refusal

NOT_UTF8 = b'{"step": 2, "train/loss": "\xff\xfe"}\n'

DAMAGE = {
    "experiment.toml": [b"", b"name = ", b"\xff\xfe", b"\0\0\0"],
    "record.json": [b"", b'{"steps"', b"\xff\xfe", b"[1]"],
    "plan.json": [b"", b'{"K"', b"\xff\xfe"],
}
CASES = [(name, content) for name, contents in DAMAGE.items() for content in contents]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(id, name="t12_400m", settings="pipeline.schedule=auto"):
    """Writes the folder of a run of two steps that was interrupted."""
    run = RunFolder((RUNS / name / id).resolve())
    run.path.mkdir(parents=True)
    run.experiment.write_text(find(name).with_settings(settings).to_toml())
    run.metrics.write_text("".join(json.dumps({"step": at, "train/loss": 5.0 / at}) + "\n" for at in (1, 2)))
    run.attempts.write_text('{"attempt": 1, "began": 1.0, "K": 2, "R": 1, "M": 2}\n')
    return run


def listed(requested=""):
    """Returns what ``make runs`` prints."""
    out = io.StringIO()
    print_runs(requested, Console(file=out, soft_wrap=True, markup=False, highlight=False))
    return out.getvalue()


def test_of_many_runs_the_newest_are_read(monkeypatch):
    monkeypatch.setattr(run_listing, "MOST_ROWS", 2)
    for at, id in enumerate(("old", "newest", "new")):
        run = make_run(id)
        for path in (run.experiment, run.metrics, run.attempts):
            os.utime(path, (1e9 if id == "old" else 2e9 - at,) * 2)
    lines = listed().splitlines()
    assert [line.split()[0] for line in lines if "t12_400m/" in line] == ["t12_400m/newest", "t12_400m/new"]
    assert lines[-1].startswith("and 1 older runs; to see some of them, give a part of their names")
    assert "t12_400m/old" in listed("400m/ol")


@pytest.mark.parametrize(("name", "content"), CASES)
def test_a_damaged_file_is_one_bad_row_and_its_reason_and_a_resume_names_it(name, content):
    make_run("good")
    (make_run("bad").path / name).write_bytes(content)
    shown = listed()
    assert re.search(r"t12_400m/good +\S+ +interrupted +2/", shown)
    assert re.search(r"t12_400m/bad +\S+ +damaged ", shown)
    assert re.search(rf"t12_400m/bad is damaged: \S+{name} is damaged: .*; ", shown)
    assert f"{name} is damaged" in listed("bad")
    said = refusal("resume", "bad", "--launcher", "local")
    assert re.search(rf"{name} is damaged: .*; (restore it|delete it)", said)


@pytest.mark.parametrize("line", [b'{"attempt": 1, "outcome": "\xff"}', b"5", b"{}", b"\0\0\0\0", b'{"attempt": null}'])
def test_a_bad_line_of_the_attempts_is_left_out(line):
    run = make_run("one")
    begin = run.attempts.read_bytes()
    end = b'{"attempt": 1, "ended": 2.0, "outcome": "done"}'
    for lines in ((line, begin.strip(), end), (begin.strip(), end, line)):
        run.attempts.write_bytes(b"\n".join(lines) + b"\n")
        assert re.search(r"t12_400m/one +\S+ +finished +2/", listed())
        assert ": finished" in listed("one")
    run.attempts.write_bytes(end + b"\n")  # a full disk rejected its begin
    assert ": finished" in listed("one")


def test_of_a_run_that_trains_the_logs_can_be_followed():
    run = make_run("one")
    run.attempts.write_text(run.attempts.read_text() + '{"attempt": 2, "began": 2.0, "K": 2, "R": 1, "M": 2}\n')
    with run_lock(run.path):
        told = listed("one")
    assert "t12_400m/one: training" in told
    assert "), 2 attempts\n" in told
    assert "    tail -f runs/t12_400m/one/logs/stage-*.log" in told


def test_a_page_of_what_is_no_run_is_refused():
    make_run("one")
    (RUNS / "begun").mkdir()
    assert "runs/begun has no experiment.toml: no run started there" in refusal("report", "--run", "runs/begun")
    assert "gpipe runs lists all 1" in refusal("report", "--run", "nothing")
    assert "no run is called 't13'; gpipe runs lists all 1" in refusal("runs", "t13")


def test_a_bad_line_of_the_metrics_is_left_out():
    run = make_run("one")
    run.metrics.write_bytes(run.metrics.read_bytes() + NOT_UTF8 + b"null\n")
    assert re.search(r"t12_400m/one +paper +interrupted +2/", listed())


def test_a_resume_names_the_damaged_line_of_the_metrics():
    run = make_run("bad")
    run.metrics.write_bytes(NOT_UTF8 + run.metrics.read_bytes())
    said = refusal("resume", "bad", "--launcher", "local")
    assert re.search(r"line 1 of \S+metrics.jsonl is damaged; .*sed -i 1d \S+metrics.jsonl", said)


def test_the_page_of_a_damaged_run_is_one_sentence():
    make_run("bad").record.write_text("")
    assert "record.json is damaged" in refusal("report", "--run", "bad")


def test_a_sweep_names_the_damaged_files_of_its_members():
    members = SWEEPS["depth_width"].members("tiny", Cluster(2, 2**30, "cpu"), RUNS.resolve())
    for member, name in zip(members, ("record.json", "experiment.toml"), strict=False):
        (RUNS / member.folder).mkdir(parents=True)
        (RUNS / member.folder / "record.json").write_text("{}")
        (RUNS / member.folder / name).write_text("")
        assert tasks_of(member, RUNS)[0].what == "train"
    out = io.StringIO()
    report("depth_width", "tiny", Console(file=out, soft_wrap=True))
    page = (RUNS / "depth_width-tiny" / "report.md").read_text()
    for text in (out.getvalue(), page):
        assert re.search(rf"{members[0].folder}/record.json is damaged: it is empty", text)
        assert re.search(rf"{members[1].folder}/experiment.toml is damaged: it is empty", text)


WRONG_TYPES = {
    "metrics.jsonl": '{"step": 3, "train/loss": "\\u001b[31m", "throughput/step_s": "<script>"}\n',
    "record.json": '{"steps": [], "wandb_run": {}, "seconds": "x"}',
    "plan.json": '{"stages": 3, "K": "x", "seconds": []}',
    "attempts.jsonl": '{"attempt": 1, "began": "x", "K": null, "R": [], "outcome": 3, "message": 7}\n',
    "scores.json": '{"bleu": 3, "pairs": "x", "step": {}}',
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_content_of_other_types_is_one_bad_row_and_one_sentence(name):
    """Such as of an edited folder; it is no defect of the suite."""
    make_run("good")
    (make_run("bad").path / name).write_text(WRONG_TYPES[name])
    out = listed()
    assert "t12_400m/good" in out
    assert "t12_400m/bad" in out
    for arguments in (("runs", "bad"), ("report", "--run", "bad"), ("report", "--run", "bad good")):
        code, *printed = call(*arguments)
        printed = "".join(printed)
        assert code in (0, 2), printed
        assert "; this is a defect" not in printed
        assert "Traceback" not in printed
        assert "\x1b[31m" not in printed
