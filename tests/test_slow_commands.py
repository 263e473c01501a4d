"""The slow tests, which CI does not run, are imported, and every setting, command and option that they name exists."""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
import typer.main

from experiments.base.overrides import paths
from experiments.registry import TASKS
from launch.cli import app
from launch.cli_options import LauncherName
from tests.slow.commands import EXAMPLES

ROOT = Path(__file__).parents[1]
SLOW = sorted((ROOT / "tests/slow").rglob("*.py"))

SETTING = re.compile(r"\b((?:pipeline|train|optimizer|model|text|tracking|images)\.[a-z_]+)=")
COMMAND = re.compile(r'"launch\.cli", "([a-z-]+)"')
LAUNCHER = re.compile(r'"--launcher",\s*"([a-z]+)"')


@pytest.mark.parametrize("path", SLOW, ids=lambda path: path.relative_to(ROOT / "tests/slow").as_posix())
def test_a_slow_test_names_what_there_is(path: Path) -> None:
    importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    text = path.read_text()
    settings = {setting for task in TASKS.values() for setting in paths(task)}
    assert set(SETTING.findall(text)) <= settings
    assert set(COMMAND.findall(text)) <= set(typer.main.get_command(app).commands)
    assert set(LAUNCHER.findall(text)) <= {*get_args(LauncherName)}


def test_the_patterns_find_settings_commands_and_launchers() -> None:
    text = "".join(path.read_text() for path in SLOW)
    assert len(SETTING.findall(text)) > 50
    assert {"experiment", "sweep"} <= set(COMMAND.findall(text))
    assert LAUNCHER.findall(text)


def test_each_command_has_an_example() -> None:
    assert {example.name for example in EXAMPLES} == set(typer.main.get_command(app).commands)
