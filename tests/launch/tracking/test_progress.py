"""Progress of long work: no output if it is short, then the elapsed time and the current part."""

import time

from launch.tracking import progress
from launch.tracking.progress import log_by_part, log_when_long


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
