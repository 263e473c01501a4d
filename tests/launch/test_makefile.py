"""Values given to ``make`` reach the command line unchanged, and are never executed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STUB = """#!/bin/sh
printf '%s\\0' "$@"
"""

HOSTILE = (
    'x"; touch hacked; "', "x'; touch hacked; '", "$(shell touch hacked)", "$$(touch hacked)", "`touch hacked`",
    "$(touch hacked)", "costs $5 and $(CC) and ${HOME} and $$", "  two   blanks  ", "a # b", "back\\slash\\", "%d\\n*?",
    "--help", "two\nlines", "Größe, 保存", "x;touch hacked|touch hacked&touch hacked>hacked", "$(eval A:=b)", "endef",
)  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A checkout with a command line that prints its arguments."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", ".venv/bin/gpipe", ".venv/installed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    stub = tmp_path / ".venv/bin/gpipe"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def run_make(place, *arguments, **variables):
    return subprocess.run(
        ["make", *arguments], cwd=place, env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip


def made(place, *arguments, **variables):
    """Returns the arguments that ``make`` passed to the command line."""
    done = run_make(place, *arguments, **variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert not (place / "hacked").exists()
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("value", HOSTILE)
def test_values_are_passed_unchanged_and_not_executed(place, value):
    typed = value.lstrip(" ")  # make itself drops blanks behind the equals sign
    assert made(place, "experiment", f"NAME={value}", f"SET={value}", f"SCALE={value}", f"LAUNCHER={value}") == [
        "experiment", "--scale", typed, "--set", typed, "--launcher", typed, "--", typed,
    ]  # fmt: skip
    assert made(place, "translate", RUN=value, TO=value, TEXT=value, CHECKPOINT=value)[2:] == [
        value, "--checkpoint", value, "--", value, value,
    ]  # fmt: skip


TARGETS = {
    "experiment": "NAME SCALE SET LAUNCHER", "resume": "RUN CHECKPOINT SET LAUNCHER", "checkpoints": "RUN",
    "plan": "NAME SCALE SET CLUSTER FORMAT", "table": "NAME RUN", "sweep": "NAME SCALE LAUNCHER",
    "report": "NAME SCALE RUN", "score": "RUN SET CHECKPOINT", "sync": "RUN", "translate": "RUN TO TEXT CHECKPOINT",
    "generate": "RUN TEXT CHECKPOINT", "export": "RUN CHECKPOINT", "check": "NAME SCALE SET",
    "diff": "NAME SCALE SET RUN A B", "list": "", "settings": "NAME SCALE SET FORMAT",
    "submit": "NAME SCALE SET RUN ADDRESS STORAGE JOB", "doctor": "ADDRESS STORAGE",
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_value_of_every_target_is_passed_untouched_and_others_are_refused(place, target):
    value, own = 'a "b"  $(shell touch hacked) `touch hacked` $5', TARGETS[target].split()
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("VALUES :=")]
    command, *arguments = made(place, target, *(f"{name}={value}" for name in own))
    assert command == target
    passed = [word for word in arguments if not word.startswith("--")]
    assert (passed.count(value), {*passed} - {value}) == (len(own), set())
    known = line.split()[2:]
    takes = " ".join(name for name in known if name in own) or "no values"
    for other in {*known} - {*own}:
        done = run_make(place, target, f"{other}={value}")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"make {target} takes no {other}; it takes {takes}." in done.stderr


def test_a_name_is_taken_from_the_command_line_alone(place):
    assert made(place, "experiment", NAME="host-17")[-2:] == ["--", ""]
    assert made(place, "report", NAME="host-17") == ["report", "--scale", "auto", "--run", "", "--", ""]
    assert made(place, "plan", "NAME=t128_6b", NAME="host-17")[-1] == "t128_6b"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["name=t12_400m"], "make knows no variable name; write NAME."),
        (["Scale=$$(touch hacked)", "LERNING=1"], "make knows no variable LERNING Scale; it knows NAME SCALE SET"),
        (["NAME=x", "SET=train.steps=5", "pipeline.stages=2"], "no variable pipeline.stages; it knows NAME SCALE SET"),
        (["NAME=x", "SET=text.clean=no", "$(shell touch hacked)"], "has no target $(shell touch hacked); values with"),
        (["NAME=x", "tests"], "make has no target tests; values with blanks stand in quotes"),
    ],
)
def test_words_that_make_does_not_know_are_refused_before_anything_runs(place, words, said):
    (place / "tests").mkdir()
    done = run_make(place, "experiment", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert not (place / "hacked").exists()


def test_without_values_each_target_has_its_own_defaults(place):
    assert made(place, "experiment") == ["experiment", "--scale", "auto", "--set", "", "--launcher", "ray", "--", ""]
    assert made(place, "sweep") == ["sweep", "--scale", "auto", "--launcher", "local", "--", ""]
    assert made(place, "plan")[-4:] == ["--format", "text", "--", ""]
    assert made(place, "settings")[-4:] == ["--format", "text", "--", ""]
    assert made(place, "export", "RUN=r") == [
        "export", "--checkpoint", "", "--", "r",
    ]  # fmt: skip
    assert made(place, "sweep", LAUNCHER="ray", SCALE="tiny")[2:5] == ["tiny", "--launcher", "ray"]
