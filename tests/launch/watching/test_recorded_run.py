"""One real run with a fault: followed by ``watch``, listed by ``runs``, and its page."""

import io
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from experiments.registry import find
from launch.runs.store import RunFolder
from launch.watching import watch as watching
from launch.watching.report import short_labels
from launch.watching.run_state import read_state
from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import gpipe_here, refusal

SETTINGS = (
    "text.corpus=django text.vocabulary=1200 text.max_length=32 model.layers=2 model.feed_forward=64 "
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
def watched(tmp_path_factory):
    """A folder with a finished run, its state while it trained, and what ``watch`` printed meanwhile, in a thread."""
    folder = tmp_path_factory.mktemp("watched")
    out, has_ended = io.StringIO(), threading.Event()

    def watch():
        run = wait_for_run(folder, has_ended)
        state = read_state(run).name
        watching.watch(run.path.name, Console(file=out, width=200, soft_wrap=True))
        return run, state

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.chdir(folder)
        patch.setenv(VARIABLE, hook(FAULTS))
        patch.setattr(watching, "LINES_EVERY_S", 0.5)
        watcher = pool.submit(watch)
        try:
            printed = gpipe_here(
                folder, "experiment", NAME, "--scale", "laptop", "--set", SETTINGS, "--launcher", "local"
            )
        finally:
            has_ended.set()
        run, state = watcher.result(60)
    return run, state, out.getvalue(), printed


def wait_for_run(folder, has_ended):
    while not (found := list(folder.glob("runs/*/*/attempts.jsonl"))):
        assert not has_ended.wait(0.1), "no run began"
    return RunFolder(found[0].parent)


@pytest.fixture
def run(watched, monkeypatch):
    monkeypatch.chdir(watched[0].path.parents[2])
    return watched[0]


def copy_of(run, id, **changed):
    """Copies a run within its folder, with settings changed in its experiment."""
    other = RunFolder(run.path.parent / id)
    shutil.copytree(run.path, other.path)
    text = other.experiment.read_text()
    for before, after in changed.values():
        assert before in text
        text = text.replace(before, after)
    other.experiment.write_text(text)
    return other


def test_watch_shows_the_steps_the_stages_the_restart_and_the_end(watched):
    run, state, shown, _ = watched
    assert state == "training"
    lines = shown.splitlines()
    steps = [line for line in lines if re.search(r"\b6/6\b.*tokens/s", line)]
    assert len(steps) == 1, shown
    assert sum(bool(re.match(r"step\s+2/6", line)) for line in lines) <= 1, shown  # not again after the restart
    rows = [line for line in lines if line.startswith("  stage 1  ")]
    assert any(re.search(r"\[\w+\]", row) for row in rows), shown
    assert any("attempt 1 failed" in line and "stage 1" in line for line in lines)
    assert lines[-1].startswith(f"run {NAME}/{run.path.name}: it is finished")


def test_watch_of_a_finished_run_is_one_sentence(run):
    assert "does not train now: it is finished; gpipe report --run " in refusal("watch", run.path.name)


def test_the_run_wrote_its_page_by_itself_and_it_needs_no_other_file(watched):
    run, _, _, printed = watched
    assert f"report: {run.report}" in printed
    page = run.report.read_text()
    for text in ("<script", "<link", "@import", "src=", 'href="http', "url(http", "<image"):
        assert text not in page, text
    links = re.findall(r'<a href="([^"]+)"', page)
    assert {"metrics.jsonl", "record.json", "attempts.jsonl", "logs/stage-0-1.log", "checkpoints/00000006/"} <= set(
        links
    )
    assert all((run.path / link).exists() for link in links)


def test_the_page_says_how_the_run_went(watched):
    run = watched[0]
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
    for verb in ("report", "score", "translate", "export"):
        assert f"gpipe {verb} {NAME}/{run.path.name}" in out
    assert f'gpipe translate {NAME}/{run.path.name} --to de "' in out
    italian = copy_of(run, "italian", rate=("[text]\n", '[text]\nlanguages = ["it"]\n'))
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


def test_compared_runs_show_only_the_settings_that_differ(run):
    other = copy_of(run, "other", rate=("learning_rate = 0.002", "learning_rate = 0.004"))
    try:
        path = Path(gpipe_here(".", "report", "--run", f"{run.path.name} other").removeprefix("report: ").strip())
        assert path.parent == Path("runs")
        page = path.read_text()
        assert re.findall(r'<td class="text[ a-z]*" dir="auto">([a-z_]+\.[a-z_]+)</td>', page) == [
            "optimizer.learning_rate"
        ]
        assert page.count(f">{run.path.name}</text>") == page.count(">other</text>") >= 4  # in the legends
        out = gpipe_here(".", "report", "--run", "other", "--run", str(run.path))
        assert Path(out.removeprefix("report: ").strip()) == path  # whatever the order
    finally:
        shutil.rmtree(other.path)


def test_runs_of_different_tasks_are_not_compared(run):
    images = RunFolder(run.path.parents[1] / "amoebanet_fashion/1")
    images.path.mkdir(parents=True)
    try:
        images.experiment.write_text(find("amoebanet_fashion").to_toml())
        assert "has not finished a step, so there is nothing to report" in refusal("report", "--run", str(images.path))
        images.metrics.write_text(json.dumps({"step": 1, "train/loss": 2.0}) + "\n")
        error = refusal("report", "--run", f"{run.path.name} {images.path}")
        assert (
            "is of translation (nll, tokens) and run amoebanet_fashion/1 of classification (accuracy, images)" in error
        )
    finally:
        shutil.rmtree(images.path.parent)


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
        (("watch", "t24_1_3b_wid/x"), ("no run 't24_1_3b_wid/x'",)),
        (("report", "--run", "runs/begun"), ("runs/begun has no experiment.toml: no run started there",)),
        (("report", "depth_width", "--run", "x"), ("both the sweep 'depth_width' and --run are given",)),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, parts):
    Path("runs/begun").mkdir(exist_ok=True)
    error = refusal(*arguments)
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error


def test_runs_with_one_id_are_told_apart_by_their_names():
    assert short_labels(["a/1", "a/2"]) == ["1", "2"]
    assert short_labels(["a/1", "b/1"]) == ["a/1", "b/1"]
