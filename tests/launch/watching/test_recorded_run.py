"""One real run with a fault: seen by ``runs`` while it trains, listed, and its page."""

import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.runs.store import RunFolder
from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import gpipe, gpipe_here, refusal

SETTINGS = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.blocks_per_stack=2 model.feed_forward=64 "
    "pipeline.schedule=fill_drain "
    "train.batch_tokens=200 train.valid_pairs=40 train.checkpoint_every=2 train.threads=1 pipeline.micro_batches=3 "
    "train.steps=6 pipeline.stages=2 optimizer.learning_rate=0.002 tracking.wandb=disabled"
)

FAULTS = [
    {"fault": "kill", "stage": 1, "step": 3, "action": "B1"},
    {"fault": "sleep", "stage": 1, "step": 3, "action": "F1", "attempt": 2, "seconds": 2.0},
]

NAME = "t24_1_3b_wide"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with a finished run, what ``runs`` said of it while it trained, and what it printed."""
    folder = tmp_path_factory.mktemp("recorded")
    has_ended = threading.Event()

    def look():
        run = wait_for_run(folder, has_ended)
        return run, gpipe(folder, "runs", run.path.name)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.chdir(folder)
        patch.setenv(VARIABLE, hook(FAULTS))
        looking = pool.submit(look)
        try:
            printed = gpipe_here(
                folder, "experiment", NAME, "--scale", "laptop", "--set", SETTINGS, "--launcher", "local"
            )
        finally:
            has_ended.set()
        run, seen = looking.result(60)
    return run, seen, printed


def wait_for_run(folder, has_ended):
    while not (found := list(folder.glob("runs/*/*/attempts.jsonl"))):
        assert not has_ended.wait(0.1), "no run began"
    return RunFolder(found[0].parent)


@pytest.fixture
def run(recorded, monkeypatch):
    monkeypatch.chdir(recorded[0].path.parents[2])
    return recorded[0]


def copy_of(run, id):
    """Copies a run within its folder."""
    other = RunFolder(run.path.parent / id)
    shutil.copytree(run.path, other.path)
    return other


def test_a_run_that_trains_is_followed_by_the_printed_line(recorded):
    run, seen, _ = recorded
    assert f"{NAME}/{run.path.name}: training" in seen
    assert f"    tail -f runs/{NAME}/{run.path.name}/logs/stage-*.log" in seen
    assert list(run.path.glob("logs/stage-*.log"))


def test_the_run_wrote_its_page_by_itself_and_it_needs_no_other_file(recorded):
    run, _, printed = recorded
    assert f"report: {run.report}" in printed
    page = run.report.read_text()
    for text in ("<script", "<link", "@import", "src=", 'href="http', "url(http", "<image"):
        assert text not in page, text
    links = re.findall(r'<a href="([^"]+)"', page)
    assert {"metrics.jsonl", "record.json", "attempts.jsonl", "logs/stage-0-1.log", "checkpoints/00000006/"} <= set(
        links
    )
    assert all((run.path / link).exists() for link in links)


def test_the_page_says_how_the_run_went(recorded):
    run = recorded[0]
    page = run.report.read_text()
    record, plan = (json.loads(path.read_text()) for path in (run.record, run.plan_json))
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page))
    assert (facts["state"], facts["step"], facts["K x R, M"]) == ("finished", "6 of 6", "2 x 1, 3")
    assert facts["loss"] == f"{record['loss_last']:.4f}"
    assert facts["validation nll"] == f"{record['valid_nll']:.4f}"
    assert re.search(r"stage 1 \S.* at step 4", page)  # the cause, in the table of attempts
    assert "cause of the end of attempt 1" in page
    cells = [f"{cell['first_layer']}-{cell['last_layer']}" for cell in plan["stages"]]
    assert all(f">{layers}</td>" in page for layers in cells)
    assert "train.batch_tokens" in page  # shrunk by the scale
    assert page.count("<svg") >= 6
    timeline = page[page.index("Timeline of a step") :]
    assert all(f">{name}</text>" in timeline for name in ("F0", "B2", "stage 1"))
    assert "simulated: " in timeline


def test_one_run_is_told_with_the_commands_that_make_sense(run):
    out = gpipe_here(".", "runs", run.path.name)
    assert f"{NAME}/{run.path.name}: finished" in out
    assert "step 6/6" in out
    assert "2 attempts" in out
    assert "checkpoints of steps 4, 6" in out
    for verb in ("report --run", "score", "translate", "export"):
        assert f"gpipe {verb} {NAME}/{run.path.name}" in out
    assert f'gpipe translate {NAME}/{run.path.name} --to de "' in out
    italian = copy_of(run, "italian")
    italian.experiment.write_text(run.experiment.read_text().replace("[text]\n", '[text]\nlanguages = ["it"]\n'))
    try:
        out = gpipe_here(".", "runs", "italian")
        assert f'gpipe translate {NAME}/italian --to it "' in out
    finally:
        shutil.rmtree(italian.path)


def test_runs_lists_newest_first_and_filters_by_name(run):
    old = copy_of(run, "old")
    for path in old.path.glob("*.*"):
        os.utime(path, (1, 1))
    try:
        out = gpipe_here(".", "runs")
        rows = [line.split() for line in out.splitlines() if NAME in line]
        assert [row[0] for row in rows] == [f"{NAME}/{run.path.name}", f"{NAME}/old"]
        assert rows[0][1:4] == ["laptop", "finished", "6/6"]
        out = gpipe_here(".", "runs", "/ol")
        assert f"{NAME}/old" in out
        assert run.path.name not in out
        assert "no run is called 't12'; gpipe runs lists all 2" in refusal("runs", "t12")
    finally:
        shutil.rmtree(old.path)


def test_a_scored_run_shows_translations_beside_their_references(run):
    other = copy_of(run, "scored")
    scores = {"bleu": 12.5, "chrf": 30.0}
    record = {
        "step": 6, "split": "test", "beam": 4, "signatures": {"bleu": "nrefs:1"},
        "directions": {"en-de": {"pairs": 50, "train_pairs": 900, "nll": 3.25, **scores}},
        "macro": {name: {"all": value} for name, value in scores.items()},
    }  # fmt: skip
    try:
        other.scores.write_text(json.dumps(record))
        (other.path / "scores").mkdir()
        texts = {"src": "Save <b>file</b>", "hyp": "Datei speichern", "ref": "Datei sichern"}
        for kind, text in texts.items():
            lines = "".join(f"{text} {at}\n" for at in range(50))
            (other.path / f"scores/en-de.{kind}").write_text(lines, encoding="utf-8")
        gpipe_here(".", "report", "--run", "scored")
        page = other.report.read_text()
        rows = [page.index(text) for text in ("Save &lt;b&gt;file&lt;/b&gt;", "Datei speichern", "Datei sichern")]
        assert rows == sorted(rows)
        assert ">12.5</td>" in page  # the mean
        assert re.search(r"en-de +50 +900 +3.25 +12.5 +30\b", page)
        assert "20 of 50 test translations, drawn at random" in page
        numbers = re.findall(r"Datei sichern (\d+)<", page)
        assert len(set(numbers)) == 20
        assert numbers == re.findall(r"Datei speichern (\d+)<", page) != [str(at) for at in range(20)]
    finally:
        shutil.rmtree(other.path)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("report", "--run", "nothing"), ("no run 'nothing'", "gpipe runs lists all 1")),
        (("report", "--run", "a b"), ("no run 'a b'",)),
        (("report", "--run", "runs/begun"), ("runs/begun has no experiment.toml: no run started there",)),
        (("report", "depth_width", "--run", "x"), ("both the sweep 'depth_width' and --run are given",)),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, parts):
    Path("runs/begun").mkdir(exist_ok=True)
    error = refusal(*arguments)
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error
