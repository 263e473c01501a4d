"""The slow tests, which CI does not run, are imported, and every setting, command and option that they name exists."""

import importlib
import re
from pathlib import Path
from typing import get_args

import typer.main

from experiments.base.overrides import paths
from experiments.registry import TASKS
from launch.cli import app
from launch.cli_options import LauncherName
from tests.slow.commands import EXAMPLES

ROOT = Path(__file__).parents[1]
SLOW = sorted((ROOT / "tests/slow").rglob("*.py"))


def test_the_slow_tests_name_what_there_is() -> None:
    for path in SLOW:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    text = "".join(path.read_text() for path in SLOW)
    found = set(re.findall(r"\b((?:pipeline|train|optimizer|model|text|tracking|images)\.[a-z_]+)=", text))
    known = {setting for task in TASKS.values() for setting in paths(task)}
    assert {"train.steps", "pipeline.stages"} <= found <= known
    assert {"local", "ray"} <= set(re.findall(r'"--launcher",\s*"([a-z]+)"', text)) <= {*get_args(LauncherName)}
    commands = {example.name for example in EXAMPLES}
    assert commands == set(typer.main.get_command(app).commands)
    assert {"experiment"} <= set(re.findall(r'"launch\.cli", "([a-z-]+)"', text)) <= commands
