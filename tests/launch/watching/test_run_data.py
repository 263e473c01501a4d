"""What a page shows of validations: the best step, the languages, an early end."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments.custom.experiment import CustomExperiment
from experiments.planning.problem import estimated_costs
from experiments.planning.request import plan_request
from experiments.registry import find
from launch.runs.store import RunFolder
from launch.supervision.attempt_log import AttemptLog
from launch.supervision.failure import Cause
from launch.watching.report import update_page
from launch.watching.run_data import read_run
from launch.watching.run_figures import loss_pictures, schedule_pictures
from launch.watching.run_page import run_page
from suite.errors import SettingError
from suite.pipeline.planning.devices import GIB
from suite.training.metrics import STEP_S
from tests.experiments.planning.works import ROOMY, language
from tests.launch.command_line import call


def folder(path, metrics, name="t12_400m", **record):
    """Writes a run's folder with these lines of metrics."""
    run = RunFolder(path)
    run.experiment.write_text(find(name).with_settings("train.validate_every=1").to_toml())
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if record:
        run.record.write_text(json.dumps(record))
    return run


def page_of(run):
    return run_page(read_run(run)).html()


def step(number, loss=5.0, **more):
    return {"step": number, "train/loss": loss, "train/nll": loss, "train/tokens": 100.0 * number, **more}


def validation(step, nll, **languages):
    return {"step": step, "valid/nll": nll, "valid/seconds": 0.1} | {
        f"valid/nll/{code}": v for code, v in languages.items()
    }


def test_validations_are_no_steps_and_the_best_one_is_marked(tmp_path):
    lines = [step(1), step(2), validation(2, 4.0), step(3, None), step(4), validation(4, 4.5)]
    run = read_run(folder(tmp_path, lines))
    assert [line["step"] for line in run.history.steps] == [1, 2, 3, 4]
    assert [at for at, _ in run.points("train/loss")] == [1, 2, 4]  # step 3 was not finite
    assert run.valid_points("nll") == [(2, 4.0), (4, 4.5)]
    assert run.best == (2, 4.0)
    page = run_page(run).html()
    assert "<dt>best validation nll</dt><dd>4.0000 at step 2</dd>" in page
    assert ">best, step 2</text>" in page


IMPROVES = [step(2), validation(2, 4.0), step(4), validation(4, 3.5)]
ACCURACIES = [step(1), {"step": 1, "valid/accuracy": 0.6}, step(2), {"step": 2, "valid/accuracy": 0.5}]


@pytest.mark.parametrize(
    ("name", "lines", "record", "points", "best"),
    [
        ("t12_400m", IMPROVES, {"steps": 4, "best_step": 2, "best_valid_nll": 4.0}, [(2, 4.0), (4, 3.5)], (2, 4.0)),
        # it trains on after its end and has no record yet
        ("t12_400m", IMPROVES, {"steps": 2, "best_step": 2, "valid_nll": 9.0}, [(2, 4.0), (4, 3.5)], (4, 3.5)),
        ("t12_400m", [step(1), step(2)], {"steps": 2, "best_step": 2, "valid_nll": 4.0}, [(2, 4.0)], None),
        ("amoebanet_fashion", ACCURACIES, {}, [(1, 0.6), (2, 0.5)], (1, 0.6)),
    ],
)
def test_the_best_validation_is_the_records_or_of_several_the_lowest_nll_or_the_highest_accuracy(
    tmp_path, name, lines, record, points, best
):
    run = read_run(folder(tmp_path, lines, name, **record))
    assert run.valid_points(run.metric) == points
    assert run.best == best


def plan_with(*schedules):
    return {
        "schedules": [
            {"schedule": name, "virtual_stages": 1, "chosen": name == "1f1b"} | found for name, found in schedules
        ]
    }


def test_a_page_has_the_step_of_each_schedule_that_fits_by_its_memory(tmp_path):
    plan = plan_with(
        ("fill_drain", {"step_s": 2.0, "peak_bytes": 4 * GIB}),
        ("1f1b", {"step_s": 2.0, "peak_bytes": 2 * GIB}),
        ("zero_bubble", {"step_s": 1.5, "peak_bytes": 3 * GIB}),
        ("interleaved", {"fault": "too large"}),
    )
    run = folder(tmp_path, [step(1)])
    run.plan_json.write_text(json.dumps(plan))
    [picture] = schedule_pictures(read_run(run))
    lines = {line.get_label(): line.get_xydata().tolist() for line in picture.figure.axes[0].get_lines()}
    assert lines == {"1f1b": [[2, 2.0]], "zero_bubble": [[3, 1.5]], "fill_drain": [[4, 2.0]]}
    assert ">zero_bubble</text>" in page_of(run)
    run.plan_json.write_text(json.dumps(plan_with(("1f1b", {"step_s": 2.0, "peak_bytes": 2 * GIB}))))
    assert "Schedules of the plan" not in page_of(run)


@pytest.mark.parametrize(("schedule", "cells"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_a_page_names_the_stages_of_the_plan_whatever_the_placement(tmp_path, schedule, cells):
    work = language(stages=2, blocks=4).with_settings(f"pipeline.schedule={schedule} pipeline.virtual_stages={cells}")
    planned = plan_request(work, ROOMY, estimated_costs)
    run = folder(tmp_path, [step(1)])
    run.plan_json.write_text(json.dumps(planned.as_dict()))
    run.trace_folder.mkdir()
    for stage, row in enumerate(planned.plan.timeline.rows):  # the run did as planned
        spans = [[span.kind, span.micro_batch, span.start, span.end, span.virtual_stage] for span in row]
        lines = {"replica": 0, "stage": stage, "stages": 2, "clock": 0.0}, {"step": 1, "began": 0.0, "spans": spans}
        (run.trace_folder / f"0-{stage}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = [table for section in run_page(read_run(run)).sections for table in section.tables]
    (rows,) = [table.rows for table in tables if table.name == "stages"]
    assert [(f"stage {row[0]}", row[1]) for row in rows] == re.findall(
        r"(stage [^:]+): layers (\S+) ", "\n".join(planned.lines())
    )
    assert [row[3] for row in rows] == pytest.approx([row[4] for row in rows])  # idle, %


def test_a_page_compares_the_plan_with_its_own_steps_and_marks_resumes_and_failures(tmp_path):
    """Four steps of 1 s with two stages, the last of which failed; four of 3 s with one stage."""
    speeds = [1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    run = folder(tmp_path, [step(at, **{STEP_S: speed}) for at, speed in enumerate(speeds, 1)])
    attempts = [
        {"data_s": 2.0, "planning_s": 3.0},
        {"attempt": 1, "began": 10.0, "K": 2, "R": 1, "M": 4, "planned_step_s": 1.5},
        {"attempt": 1, "start": 0, "first_step_s": 2.5},
        {"attempt": 1, "ended": 17.0, "outcome": "failed", "start": 0, "reached": 5, "kind": "program"},
        {"data_s": 2.0, "planning_s": 3.0},
        {"attempt": 2, "began": 50.0, "K": 1, "R": 1, "M": 4, "planned_step_s": 3.5},
        {"attempt": 2, "start": 4, "first_step_s": 4.0},
        {"attempt": 2, "ended": 64.0, "outcome": "done", "start": 4, "reached": 8},
    ]
    run.attempts.write_text("".join(json.dumps(line) + "\n" for line in attempts))
    run.plan_json.write_text(json.dumps({"step_s": 3.5}))
    found = read_run(run)
    assert [line["step"] for line in found.steps_as_planned()] == [5, 6, 7, 8]
    assert [line["step"] for line in found.steps_as_planned(1.5)] == [1, 2, 3, 4]
    page = run_page(found).html()
    assert re.search(r">step, s</td><td>3.5</td><td>3</td>", page)
    assert found.wall_s == {
        "data": 4.0, "planning": 6.0, "start of the workers": 2.5, "training": 16.0, "validation": 0.0,
        "saving and other work": 2.5,
    }  # fmt: skip
    assert re.search(r">training</td><td [^>]+>16.00 s</td>", page)
    [loss] = loss_pictures(found)
    lines = {line.get_label(): set(line.get_xdata()) for line in loss.figure.axes[0].get_lines()}
    assert (lines["resumed"], lines["failed"]) == ({4}, {5})


def test_what_decides_the_best_validation_is_shown_and_the_metric_has_its_name(tmp_path):
    """Of a model of your own the loss decides: a higher accuracy after it is not the best."""
    lines = []
    for at, loss, accuracy in ((10, 0.5, 0.95), (20, 0.6, 0.96)):
        figures = {"loss": loss, "accuracy": accuracy, "recall": accuracy / 2}
        own = {f"train/{name}": value for name, value in figures.items()}
        lines.append({"step": at, **own, "train/lr": 0.1, "train/rows": 1.0})
        lines.append({"step": at, **{f"valid/{name}": value for name, value in figures.items()}, "valid/seconds": 0.1})
    run = folder(tmp_path, lines)
    source = {"source": "own.py:f", "layer_count": 2, "train": {"validate_every": 10}}
    fields = {"name": "t", "scale": "laptop", "pipeline": {}, "optimizer": {}} | source
    run.experiment.write_text(CustomExperiment.validated(fields).to_toml())
    found = read_run(run)
    assert (found.metric, found.best) == ("accuracy", (10, 0.5))
    page = run_page(found).html()
    for name, value in (
        ("validation loss", "0.6000"), ("validation accuracy", "0.9600"), ("validation recall", "0.4800"),
        ("best validation loss", "0.5000 at step 10"),
    ):  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    for name in ("Loss per row", "Accuracy", "Recall"):
        assert f"{name} of training and of held-out data." in page
    assert "<dt>scale</dt>" not in page  # a model of one's own has none
    assert page.count(">best, step 10</text>") == 1


def test_languages_are_listed_at_the_best_and_the_last_validation_and_an_early_end_is_said(tmp_path):
    reason = "stopped early after 4 of 9 steps: 2 validations in a row did not improve"
    lines = [step(2), validation(2, 4.0, de=3.0, fr=5.0), step(4), validation(4, 4.5, de=3.5, fr=5.5)]
    page = page_of(folder(tmp_path, lines, steps=4, best_step=2, best_valid_nll=4.0, stopped_early=reason))
    table = page[page.index("Validation nll by language") :]
    assert table.index("best: step 2") < table.index("last: step 4") < table.index(">de<") < table.index(">fr<")
    assert re.search(r">de</td><td>3</td><td>3.5</td>", table)
    assert f"<p>The run {reason}.</p>" in page


def test_of_a_hundred_languages_the_page_shows_both_ends_and_the_others_on_a_click(tmp_path):
    languages = {f"l{at:02}": 3.0 + at / 100 for at in range(100)}
    page = page_of(folder(tmp_path, [step(1), validation(1, 4.0, **languages)]))
    table = page[page.index("lowest and highest of 100 languages") : page.index("all 100 languages")]
    assert re.findall(r">(l\d\d)<", table) == [*(f"l{at:02}" for at in range(6)), *(f"l{at}" for at in range(94, 100))]
    assert "l50" in page[page.index("all 100 languages") :]


def test_a_run_without_a_step_is_refused(tmp_path):
    with pytest.raises(SettingError, match="has not finished a step, so there is nothing to report; its logs are in"):
        read_run(folder(tmp_path, []))


def test_a_page_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, run = io.StringIO(), folder(tmp_path, [])
    update_page(run, Console(file=out, soft_wrap=True))
    assert (out.getvalue(), run.report.exists()) == ("", False), "it failed before its first step, which is said"
    folder(tmp_path, [step(1)])
    run.report.mkdir()
    update_page(run, Console(file=out, soft_wrap=True))
    assert re.search(r"the run's page could not be written \(.*Is a directory.*\); the traceback is in", out.getvalue())


def test_a_scored_run_shows_translations_drawn_at_random_beside_their_references(tmp_path):
    run, scores = folder(tmp_path, [step(1)]), {"bleu": 12.5, "chrf": 30.0}
    directions = {"en-de": {"pairs": 50, "train_pairs": 900, "nll": 3.25, **scores}}
    macro = {name: {"all": value} for name, value in scores.items()}
    record = {"step": 6, "split": "test", "beam": 4, "signatures": {"bleu": "nrefs:1"}, "macro": macro}
    run.scores.write_text(json.dumps(record | {"directions": directions}))
    (run.path / "scores").mkdir()
    for kind, text in {"src": "Save <b>file</b>", "hyp": "Datei speichern", "ref": "Datei sichern"}.items():
        lines = "".join(f"{text} {at}\n" for at in range(50))
        (run.path / f"scores/en-de.{kind}").write_text(lines)
    page = page_of(run)
    rows = [page.index(text) for text in ("Save &lt;b&gt;file&lt;/b&gt;", "Datei speichern", "Datei sichern")]
    assert rows == sorted(rows)
    assert ">12.5</td>" in page  # the mean
    assert re.search(r"en-de +50 +900 +3.25 +12.5 +30\b", page)
    assert "20 of 50 test translations, drawn at random" in page
    numbers = re.findall(r"Datei sichern (\d+)<", page)
    assert len(set(numbers)) == 20
    assert numbers == re.findall(r"Datei speichern (\d+)<", page) != [str(at) for at in range(20)]


def test_a_page_names_the_cause_of_each_attempts_end(tmp_path):
    run = folder(tmp_path, [step(1)])
    attempts, death = AttemptLog(run.attempts), Cause("death", "stage 1: killed", "killed by SIGKILL", 0, 1, 3, "B1")
    known = SimpleNamespace(first_step=0, last_step=4, verdict_time=None)
    attempts.end(attempts.begin(find("t12_400m")), known, "failed", death)
    page = page_of(run)
    assert re.search(r"stage 1 killed by SIGKILL at step 4", page)
    assert "cause of the end of attempt 1" in page


HOSTILE = """
format = 5
name = "t"
scale = "laptop"
task = "custom"
source = "{source}"
layer_count = 2
pipeline = {{stages = 1}}
optimizer = {{}}
train = {{steps = 2}}
"""


@pytest.mark.parametrize("command", ["report --run", "runs", "resume --launcher local", "checkpoints", "export"])
def test_no_command_executes_code_in_a_run_folder(tmp_path, command):
    """A run folder may come from another machine: a report reads its records, a resume refuses it."""
    path = tmp_path / "runs" / "t" / "1"
    path.mkdir(parents=True)
    step = {"step": 1, "train/loss": 4.1, "train/hits": 0.5, "train/rows": 8.0}
    run = folder(path, [step, {"step": 1, "valid/hits": 0.4, "valid/loss": 4.0}])
    (path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    run.experiment.write_text(HOSTILE.format(source=f"{path}/evil.py:f"))
    code, _, errors = call(*command.split(), "t/1", folder=tmp_path)
    assert "Traceback" not in errors
    assert not (tmp_path / "executed").exists(), errors
    assert code == {"report --run": 0, "runs": 0, "checkpoints": 1}.get(command, 2), errors
    if command == "export" or command.startswith("resume"):
        assert "code in run folders is never executed" in " ".join(errors.split())
    if command == "report --run":
        assert "validation hits" in run.report.read_text()
