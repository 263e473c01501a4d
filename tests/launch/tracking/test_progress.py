"""Progress of long work: no output if it is short, then the elapsed time and the current part."""

import io
import re
import time
from queue import SimpleQueue

from rich.console import Console

from launch.tracking import progress
from launch.tracking.progress import Bar, log_by_part, log_when_long


def test_long_work_is_logged_with_its_part_and_short_work_is_not(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.2)
    said = SimpleQueue()
    with log_when_long("planning x", said.put) as tell:
        tell("first")
    assert said.empty()
    with log_when_long("planning x", said.put) as tell:
        tell("first")
        assert re.fullmatch(r"planning x, \d+ s so far: first", said.get(timeout=30))
        tell("second")
        while not said.get(timeout=30).endswith(": second"):
            pass
    count = said.qsize()
    time.sleep(0.5)
    assert said.qsize() == count


def test_an_error_while_logging_progress_prints_no_traceback(monkeypatch, capfd):
    logged = SimpleQueue()
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    monkeypatch.setattr(progress, "log_error", logged.put)

    def log(text):
        raise OSError("the terminal is gone")

    with log_when_long("planning x", log):
        assert str(logged.get(timeout=30)) == "the terminal is gone"
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


def test_long_steps_are_all_printed_and_short_ones_once_a_minute(monkeypatch):
    now, printed = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = Bar(Console(file=printed, width=200), 1000, 500)
    for step, now[0] in ((1, 10.0), (2, 59.0), (3, 61.0), (4, 120.0), (5, 300.0), (6, 400.0)):
        bar.show(step, [(0, "loss 1")])
    assert [line.split()[1] for line in printed.getvalue().splitlines()] == ["3/1000", "5/1000", "6/1000"]


def test_a_resumed_run_prints_only_multiples_of_the_interval_and_the_last_step():
    printed = io.StringIO()
    bar = Bar(Console(file=printed, width=200), 52, 10)
    for step in range(37, 53):
        bar.show(step, [(0, "loss 1")])
    assert [line.split()[1] for line in printed.getvalue().splitlines()] == ["40/52", "50/52", "52/52"]
