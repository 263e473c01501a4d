"""Progress of long work: no output if it is short, then the elapsed time and the current part."""

import io
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launch.tracking import progress
from launch.tracking.progress import Bar, Update, log_by_part, log_when_long, read_update


def test_long_work_is_logged_with_its_part_and_short_work_is_not(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.2)
    said: list[str] = []
    with log_when_long("planning x", said.append) as tell:
        tell("first")
    assert said == []
    with log_when_long("planning x", said.append) as tell:
        tell("first")
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.02)
        tell("second")
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    count = len(said)
    assert said[0].startswith("planning x, ")
    assert said[0].endswith(" s so far: first")
    assert any(line.endswith(": second") for line in said)
    time.sleep(0.5)
    assert len(said) == count


def test_an_error_while_logging_progress_prints_no_traceback(monkeypatch, capfd):
    logged: list[Exception] = []
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    monkeypatch.setattr(progress, "log_error", logged.append)

    def log(text):
        raise OSError("the terminal is gone")

    with log_when_long("planning x", log):
        deadline = time.monotonic() + 30
        while not logged and time.monotonic() < deadline:
            time.sleep(0.02)
    assert str(logged[0]) == "the terminal is gone"
    assert capfd.readouterr() == ("", "")


def test_parts_are_counted_and_the_time_left_uses_their_mean(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    said: list[str] = []
    report = log_by_part("table 1", said.append)
    now = 105.0
    report(0, 4, "a")
    now = 115.0
    report(1, 4, "b")
    assert said == ["table 1: 1 of 4: a", "table 1: 2 of 4, 10 s so far, about 30 s left: b"]


@given(
    st.builds(
        Update,
        st.integers(0),
        st.integers(1),
        st.lists(st.tuples(st.integers(), st.text())).map(tuple),
        st.floats(0, allow_nan=False, allow_infinity=False),
        st.integers(1),
    )
)
def test_a_marked_line_is_one_line_and_is_read_back(update):
    line = update.line()
    assert "\n" not in line
    assert read_update(line) == update


@pytest.mark.parametrize(
    "line", ["", "step 3/4", "@gpipe-progress ", "@gpipe-progress {}", '@gpipe-progress {"step": 1']
)
def test_other_lines_are_not_progress(line):
    assert read_update(line) is None


def test_a_followed_job_is_shown_like_a_local_run():
    remote, local = io.StringIO(), io.StringIO()
    marked, bar = Bar(Console(file=remote, width=200), marked=True), Bar(Console(file=local, width=200))
    for step in (0, 2, 4):
        marked._next_s = 0.0
        marked.show(Update(step, 4, ((0, "loss 1"),), 1.5))
    for line in remote.getvalue().splitlines():
        bar.show(read_update(line))
    assert local.getvalue().splitlines() == ["step 2/4  loss 1", "step 4/4  loss 1"]
    assert json.loads(remote.getvalue().splitlines()[-1].partition(" ")[2])["elapsed_s"] == 1.5


def test_the_log_of_a_long_job_stays_small(monkeypatch):
    """A line every two seconds in the first half hour, and one a minute after the first day."""
    now, printed = 0.0, []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    marked = Bar(Console(file=io.StringIO()), marked=True)
    monkeypatch.setattr(marked._console, "print", lambda line: printed.append(len(line)))
    days = 30
    for step in range(0, days * 86400, 2):
        now = float(step)
        marked.show(Update(step, 10**9, ((0, "loss 1"),), now))
    assert 60 * 24 * days < len(printed) < 60 * 24 * days + 7000


def test_a_resumed_run_prints_only_multiples_of_the_interval_and_the_last_step():
    printed = io.StringIO()
    bar = Bar(Console(file=printed, width=200))
    for step in range(37, 53):
        bar.show(Update(step, 52, ((0, "loss 1"),), 1.5, 10))
    assert [line.split()[1] for line in printed.getvalue().splitlines()] == ["40/52", "50/52", "52/52"]
