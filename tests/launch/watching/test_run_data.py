"""What a page shows of validations: the best step, the languages, an early end."""

import io
import json
import re

import pytest
from rich.console import Console

from experiments.custom.experiment import CustomExperiment
from experiments.registry import find
from launch.runs.store import RunFolder
from launch.watching.report import comparison, update_page
from launch.watching.run_data import read_run
from launch.watching.run_figures import schedule_pictures
from launch.watching.run_page import run_page
from launch.watching.run_state import read_state
from launch.watching.watch import WatchView, describe_end
from suite.errors import SettingError
from suite.pipeline.planning.devices import GIB
from tests.launch.command_line import call


def folder(path, metrics, name="t12_400m", **record):
    """Writes a run's folder with these lines of metrics."""
    run = RunFolder(path)
    run.experiment.write_text(find(name).with_settings("train.validate_every=1").to_toml())
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if record:
        run.record.write_text(json.dumps(record))
    return run


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
    assert run.valid_points("nll", "train/tokens") == [(200.0, 4.0), (400.0, 4.5)]
    assert run.best == (2, 4.0)
    page = run_page(run).html()
    assert "<dt>best validation nll</dt><dd>4.0000 at step 2</dd>" in page
    assert ">best, step 2</text>" in page


def test_the_record_decides_which_step_was_the_best(tmp_path):
    lines = [step(2), validation(2, 4.0), step(4), validation(4, 3.5)]
    assert read_run(folder(tmp_path, lines, steps=4, best_step=2, best_valid_nll=4.0)).best == (2, 4.0)


def test_a_run_that_trains_on_after_its_end_has_no_record_yet(tmp_path):
    lines = [step(2), validation(2, 4.0), step(4), validation(4, 3.5)]
    run = read_run(folder(tmp_path, lines, steps=2, best_step=2, best_valid_nll=4.0, valid_nll=9.0))
    assert run.record == {}
    assert run.best == (4, 3.5)
    assert run.valid_points("nll") == [(2, 4.0), (4, 3.5)]


def test_a_validation_without_its_step_has_no_place_on_an_axis_of_tokens(tmp_path):
    run = read_run(folder(tmp_path, [validation(1, 4.2), step(2), validation(2, 4.0)]))
    assert run.valid_points("nll", "train/tokens") == [(200.0, 4.0)]
    assert run.valid_points("nll") == [(1, 4.2), (2, 4.0)]


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
    front = lines.popitem()[1]
    assert lines == {"1f1b": [[2, 2.0]], "zero_bubble": [[3, 1.5]], "fill_drain": [[4, 2.0]]}
    assert front == [[2, 2.0], [3, 1.5]]
    assert ">zero_bubble</text>" in run_page(read_run(run)).html()


def test_a_page_of_a_plan_with_one_schedule_compares_none(tmp_path):
    run = folder(tmp_path, [step(1)])
    run.plan_json.write_text(json.dumps(plan_with(("1f1b", {"step_s": 2.0, "peak_bytes": 2 * GIB}))))
    assert "Schedules of the plan" not in run_page(read_run(run)).html()


def test_more_accuracy_is_better(tmp_path):
    lines = [{"step": s, "train/loss": 1.0} for s in (1, 2)]
    lines += [{"step": s, "valid/accuracy": value} for s, value in ((1, 0.6), (2, 0.5))]
    assert read_run(folder(tmp_path, lines, name="amoebanet_fashion")).best == (1, 0.6)


def test_what_decides_the_best_validation_is_shown_and_the_metric_has_its_name(tmp_path):
    """Of a model of your own the loss decides: a higher accuracy after it is not the best."""
    lines = []
    for at, loss, accuracy in ((10, 0.5, 0.95), (20, 0.6, 0.96)):
        lines.append({"step": at, "train/loss": loss, "train/accuracy": accuracy, "train/lr": 0.1, "train/rows": 1.0})
        lines.append({"step": at, "valid/loss": loss, "valid/accuracy": accuracy, "valid/seconds": 0.1})
    run = folder(tmp_path, lines)
    source = {"source": "own.py:f", "layer_count": 2, "train": {"validate_every": 10}}
    fields = {"name": "t", "scale": "laptop", "pipeline": {}, "optimizer": {}} | source
    run.experiment.write_text(CustomExperiment.validated(fields).to_toml())
    found = read_run(run)
    assert (found.metric, found.best) == ("accuracy", (10, 0.5))
    page = run_page(found).html()
    for name, value in (
        ("validation loss", "0.6000"), ("validation accuracy", "0.9600"),
        ("best validation loss", "0.5000 at step 10"),
    ):  # fmt: skip
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "Loss per row of training and of held-out data." in page
    assert "Accuracy of training and of held-out data." in page
    assert page.count(">best, step 10</text>") == 1
    table = comparison([found, found]).html()
    assert "validation accuracy" in table
    assert "best loss" in table


def test_one_validation_at_the_end_is_not_called_the_best(tmp_path):
    run = read_run(folder(tmp_path, [step(1), step(2)], steps=2, valid_nll=4.0))
    assert run.valid_points("nll") == [(2, 4.0)]
    assert run.best is None


def test_languages_are_listed_at_the_best_and_the_last_validation(tmp_path):
    lines = [step(2), validation(2, 4.0, de=3.0, fr=5.0), step(4), validation(4, 4.5, de=3.5, fr=5.5)]
    page = run_page(read_run(folder(tmp_path, lines))).html()
    table = page[page.index("Validation nll by language") :]
    assert table.index("best: step 2") < table.index("last: step 4") < table.index(">de<") < table.index(">fr<")
    assert re.search(r">de</td><td>3</td><td>3.5</td>", table)


def test_of_a_hundred_languages_the_page_shows_both_ends_and_the_others_on_a_click(tmp_path):
    languages = {f"l{at:02}": 3.0 + at / 100 for at in range(100)}
    page = run_page(read_run(folder(tmp_path, [step(1), validation(1, 4.0, **languages)]))).html()
    table = page[page.index("lowest and highest of 100 languages") : page.index("all 100 languages")]
    assert re.findall(r">(l\d\d)<", table) == [*(f"l{at:02}" for at in range(6)), *(f"l{at}" for at in range(94, 100))]
    assert "l50" in page[page.index("all 100 languages") :]


def test_an_early_end_is_said(tmp_path):
    reason = "stopped early after 4 of 9 steps: 2 validations in a row did not improve"
    page = run_page(read_run(folder(tmp_path, [step(4)], steps=4, stopped_early=reason))).html()
    assert f"<p>The run {reason}.</p>" in page


def test_a_run_without_a_step_is_refused(tmp_path):
    with pytest.raises(SettingError, match="has not finished a step, so there is nothing to report; its logs are in"):
        read_run(folder(tmp_path, []))


def test_a_page_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, run = io.StringIO(), folder(tmp_path, [step(1)])
    run.report.mkdir()
    update_page(run, Console(file=out, soft_wrap=True))
    assert re.search(r"the run's page could not be written \(.*Is a directory.*\); the traceback is in", out.getvalue())


def test_a_run_that_failed_before_its_first_step_gets_no_page_and_no_second_message(tmp_path):
    out, run = io.StringIO(), folder(tmp_path, [])
    update_page(run, Console(file=out))
    assert out.getvalue() == ""
    assert not run.report.exists()


def test_watch_tells_validations_from_steps_because_on_a_terminal_only_the_last_step_stays(tmp_path):
    run = folder(tmp_path, [step(1)])
    view = WatchView(run, find("t12_400m").with_settings("train.log_every=2"))
    with run.metrics.open("a") as file:
        steps = [step(number, **{"throughput/step_s": 0.5}) for number in (2, 3)]
        file.write("".join(json.dumps(line) + "\n" for line in (steps[0], validation(2, 4.0), steps[1])))
    (first, is_of_step), second = view.poll()
    assert (first.startswith("step 2/"), is_of_step) == (True, True)
    assert view.step_line().startswith("step 3/")
    assert second == ("step 2: validation nll 4.0000 (0.1 s)", False)


def test_a_run_without_an_attempt_never_started(tmp_path):
    run = folder(tmp_path, [])
    assert describe_end(run, read_state(run)).startswith("it never started; make resume RUN=")


HOSTILE = """
format = 3
name = "t"
scale = "laptop"
task = "custom"
source = "{source}"
layer_count = 2
pipeline = {{stages = 1}}
optimizer = {{}}
train = {{steps = 2}}
"""


@pytest.mark.parametrize(
    "command", ["report --run", "runs", "watch", "resume --launcher local", "checkpoints", "export"]
)
def test_no_command_executes_code_in_a_run_folder(tmp_path, command):
    """A run folder may come from another machine: a report reads its records, a resume refuses it."""
    path = tmp_path / "runs" / "t" / "1"
    path.mkdir(parents=True)
    run = folder(
        path,
        [
            {"step": 1, "train/loss": 4.1, "train/hits": 0.5, "train/rows": 8.0},
            {"step": 1, "valid/hits": 0.4, "valid/loss": 4.0},
        ],
    )
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
