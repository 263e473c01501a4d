"""Escape sequences in logs and records do not reach the terminal, and addresses that run code are no links."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.table import Table

from experiments.report.page import Page, Section
from launch import cli
from launch.terminal import Terminal
from launch.tracking.progress import Bar
from tests.launch.command_line import gpipe_here

TITLE, CLIPBOARD, RED, UP = "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x1b\\", "\x1b[31m", "\x1b[2A"


def test_a_terminal_obeys_no_escape_sequence_of_a_text():
    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, color_system=None, width=60)
    table = Table("run" + TITLE)
    table.add_row(f"name{UP}")
    console.print(f"log {TITLE}{CLIPBOARD}{RED}line\x1b\x9b", table, os.fsdecode(b"caf\xe9"))
    bar = Bar(console, 2, 1)
    bar.start()
    bar.show(1, [(0, f"loss{TITLE}")])
    console.print(f"from a job{CLIPBOARD}")
    bar.stop()
    printed = out.getvalue()
    assert r"log \x1b]0;title" in printed  # as text
    assert r"line\x1b\x9b" in printed
    assert r"caf\udce9" in printed  # a file's name that is not UTF-8
    assert "from a job" in printed
    for sequence in (TITLE, CLIPBOARD, RED, UP, "\x9b", "\x1b]"):
        assert sequence not in printed


def test_a_table_for_a_file_is_as_wide_as_its_words():
    out, words = io.StringIO(), ["a" * 70, "b" * 70]
    table = Table(*words)
    table.add_row(*words)
    Terminal(file=out).print(table)
    assert all(out.getvalue().count(word) == 2 for word in words)


def test_runs_prints_no_escape_sequence_of_a_record(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "t" / "1"
    run.mkdir(parents=True)
    (run / "experiment.toml").write_text('name = "t"\ntask = "translation"\nscale = "\\u001B]0;title\\u0007small"\n')
    attempts = [
        {"attempt": 1, "began": 1.0, "K": 1, "R": 1},
        {"attempt": 1, "ended": 2.0, "outcome": "failed", "cause": f"cause{TITLE}", "message": f"cause{CLIPBOARD}"},
    ]
    (run / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempts))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli.console, "_force_terminal", True)
    printed = gpipe_here(tmp_path, "runs")
    assert "t/1 failed: cause" in printed
    assert "\x1b]" not in printed


@pytest.mark.parametrize("address", ["javascript://x%0aalert(1)", " JavaScript:alert(1)", "java\nscript:1", "data:x,y"])
def test_an_address_that_runs_code_is_no_link(address):
    page = Page("t", [Section("s", links=[("good", "logs/a.log"), ("web", "https://h/x"), ("bad", address)])]).html()
    assert page.count("href=") == 2
    assert "<li>bad</li>" in page


def test_what_the_encoding_of_the_output_lacks_is_escaped():
    """As with a locale of Latin-1, or PYTHONIOENCODING."""
    code = "from launch import entry; entry.prepare(); print('1 \u00b1 2')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "1 \\xb1 2\n"), done.stderr
