"""The options that several commands of ``launch/cli.py`` share, and where commands print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from launch.terminal import Terminal
from suite.errors import SettingError, nearest

console = Terminal()
error_console = Terminal(stderr=True, style="red")


def choice(option: str, kind: Any, help: str) -> Any:
    """Returns an option whose values are those of a ``Literal``. Another value raises SettingError."""
    values: tuple[str, ...] = get_args(kind)

    def parse(value: str) -> str:
        if value not in values:
            raise SettingError(f"unknown {option.strip('-')} {value!r}; {nearest(value, values)}")
        return value

    return typer.Option(
        option, parser=parse, metavar=f"<{'|'.join(values)}>", autocompletion=lambda: [*values], help=help
    )


def experiment_names() -> list[str]:
    """Returns the names of the experiments, for completion: from the source, because its import takes seconds."""
    sources = sorted((Path(__file__).parents[1] / "experiments").glob("*/runs.py"))
    return [name for source in sources for name in re.findall(r"^def ([a-z]\w*)\(\)", source.read_text(), re.MULTILINE)]


Scale = Literal["auto", "paper", "laptop", "slice"]
LauncherName = Literal["ray", "local", "env"]
SweepLauncherName = Literal["ray", "local"]
PlanFormat = Literal["text", "json"]
SettingsFormat = Literal["text", "markdown"]

NameArgument = Annotated[str, typer.Argument(help="empty: list the names")]
ExperimentArgument = Annotated[str, typer.Argument(autocompletion=experiment_names, help="empty: list the names")]
ScaleOption = Annotated[
    Scale, choice("--scale", Scale, "paper: the paper's sizes; laptop: narrow; slice: the paper's widths, few layers")
]
NONE_GIVEN: list[str] = []  # typer copies it
SetOption = Annotated[list[str], typer.Option("--set", help='"train.steps=50 pipeline.stages=4"; several add up')]
ScoreSetOption = Annotated[list[str], typer.Option("--set", help='"score.beam=1 score.languages=de"; several add up')]
_LAUNCHERS = "ray: Ray; local: plain processes on this machine"
LauncherOption = Annotated[
    LauncherName,
    choice("--launcher", LauncherName, f"{_LAUNCHERS}; env: this one of the processes of torchrun or srun"),
]
SweepLauncherOption = Annotated[SweepLauncherName, choice("--launcher", SweepLauncherName, _LAUNCHERS)]
CheckpointOption = Annotated[
    str, typer.Option("--checkpoint", metavar="<best|latest|STEP>", help="empty: the best, otherwise the latest")
]
AddressOption = Annotated[str, typer.Option(help="address of the cluster's dashboard; empty: RAY_API_SERVER_ADDRESS")]
