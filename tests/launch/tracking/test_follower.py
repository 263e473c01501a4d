"""Progress output without a terminal, from the files that workers write."""

import io
import json

import pytest
from rich.console import Console

from experiments.registry import find
from launch.runs.store import RunFolder
from launch.tracking.follower import Follower, LogTail


def shown(run, steps, lines, *on_step, messages="", **train):
    """Returns what is printed while the run writes these lines of metrics and these messages."""
    settings = " ".join(f"train.{name}={value}" for name, value in {"steps": steps, **train}.items())
    out, experiment = io.StringIO(), find("t12_400m").with_settings(settings)
    with Follower(run, experiment, Console(file=out, width=200), *on_step):
        run.messages.write_text(messages)
        write(run, *lines)
    return out.getvalue().splitlines()


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def step(number, **more):
    return {"step": number, "train/loss": 8.0 - number, "throughput/step_s": 2.0, **more}


def write(run, *lines):
    """Writes the lines of the metrics."""
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_tail_returns_complete_lines_once_and_restarts_if_the_file_is_rewritten(tmp_path):
    path = tmp_path / "file"
    tail = LogTail(path)
    assert list(tail.lines()) == []
    path.write_text("one\ntwo\nthr")
    assert list(tail.lines()) == ["one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert list(tail.lines()) == ["three"]
    path.write_text("new\n")
    assert list(tail.lines()) == ["new"]


def test_step_loss_speed_and_time_left_are_shown_and_messages_pass_through(run):
    steps, rates = [], {"throughput/tokens_per_s": 1234.0}
    metrics = step(1, **rates), step(2, **rates), {"step": 2, "valid/nll": 7.5, "valid/seconds": 1.0}
    lines = shown(run, 4, metrics, lambda *step: steps.append(step), messages="a word\n")
    assert "a word" in lines
    assert steps == [(1, 2.0), (2, 2.0)]
    assert "step 2/4  loss 6.000  1,234 tokens/s  0:04 left" in lines


def test_a_message_about_a_step_follows_its_line(run):
    messages = "10:00:00 resumed at step 0\n10:00:01 step 1: the loss rose from 1.000 to 7.000\n"
    before, line, after = shown(run, 2, [step(1)], messages=messages, log_every=1)
    assert (before[-6:], line[:8], after[9:16]) == ("step 0", "step 1/2", "step 1:")


def test_every_due_step_is_shown_and_each_validation_without_its_languages(run):
    validation = {"step": 3, "valid/nll": 7.5, "valid/nll/de": 7.0, "valid/seconds": 1.25}
    assert shown(run, 6, [*map(step, (1, 2, 3)), validation, *map(step, (4, 5))], log_every=2) == [
        "step 2/6  loss 6.000  0:08 left",
        "step 3: validation nll 7.5000 (1.2 s)",
        "step 4/6  loss 4.000  0:05 left",  # with another validation, at the end
    ]


def test_the_time_left_counts_the_validations_to_come_as_long_as_the_last_one(run):
    metrics = step(3), step(4), {"step": 4, "valid/nll": 7.5, "valid/seconds": 60.0}, step(5), step(8)
    lines = shown(run, 10, metrics, log_every=1, validate_every=4)
    left = [line.rpartition("  ")[2] for line in lines if "loss" in line]
    assert left == ["0:14 left", "0:12 left", "2:10 left", "1:04 left"]  # none was timed before step 4's


def test_a_resumed_run_does_not_print_its_earlier_steps_and_validations_again(run):
    earlier = step(1), step(2), {"step": 2, "valid/nll": 7.5}
    write(run, *earlier, step(3), step(4))
    assert shown(run, 6, [*earlier, step(3)], log_every=1) == ["step 3/6  loss 5.000  0:06 left"]
