"""What long work says of itself: nothing of what is quickly done, then how long it takes and what it is at."""

import time

from launch import progress
from launch.progress import told_by_part, told_when_long


def test_long_work_is_told_with_its_part_and_quick_work_is_not(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.2)
    said: list[str] = []
    with told_when_long("planning x", said.append) as tell:
        tell("first")
    assert said == []
    with told_when_long("planning x", said.append) as tell:
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


def test_a_failure_to_tell_is_logged_and_prints_no_traceback(monkeypatch, capfd):
    logged: list[Exception] = []
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    monkeypatch.setattr(progress, "log_error", logged.append)

    def say(text):
        raise OSError("the terminal is gone")

    with told_when_long("planning x", say):
        deadline = time.monotonic() + 30
        while not logged and time.monotonic() < deadline:
            time.sleep(0.02)
    assert str(logged[0]) == "the terminal is gone"
    assert capfd.readouterr() == ("", "")


def test_parts_are_counted_and_what_is_left_is_their_mean(monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    said: list[str] = []
    report = told_by_part("table 1", said.append)
    now = 105.0
    report(0, 4, "a")
    now = 115.0
    report(1, 4, "b")
    assert said == ["table 1: 1 of 4: a", "table 1: 2 of 4, 10 s so far, about 30 s left: b"]
