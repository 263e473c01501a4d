"""The options that several commands of ``launch/cli.py`` share, and where commands print."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, get_args

import typer

from experiments.names import Scale, experiment_names
from launch.terminal import Terminal
from suite.errors import check_known

console = Terminal()
error_console = Terminal(stderr=True, style="red")


def choice(option: str, kind: Any, help: str) -> Any:
    """Returns an option whose values are those of a ``Literal``. Another value raises SettingError."""
    values: tuple[str, ...] = get_args(kind)

    def parse(value: str) -> str:
        check_known(option.strip("-"), value, values)
        return value

    return typer.Option(
        option, parser=parse, metavar=f"<{'|'.join(values)}>", autocompletion=lambda: [*values], help=help
    )


LauncherName = Literal["ray", "local", "env"]
SweepLauncherName = Literal["ray", "local"]
PlanFormat = Literal["text", "json"]
SettingsFormat = Literal["text", "markdown"]

NameArgument = Annotated[str, typer.Argument(help="empty: list the names")]
ExperimentArgument = Annotated[str, typer.Argument(autocompletion=experiment_names, help="as gpipe list has them")]
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
ResumedOption = Annotated[
    str,
    typer.Option(
        "--checkpoint", metavar="<best|latest|STEP>", help="empty: the latest; those after the chosen one are abandoned"
    ),
]
SideOption = Annotated[
    list[str], typer.Option(help='settings, such as "pipeline.stages=2 pipeline.schedule=1f1b"; or plain: no pipeline')
]
StepsOption = Annotated[int, typer.Option(help="how many are trained")]
AddressOption = Annotated[str, typer.Option(help="address of the cluster's dashboard; empty: RAY_API_SERVER_ADDRESS")]


def _print_version(requested: bool) -> None:
    if not requested:
        return
    from launch.node_probe import installed_versions

    for package, found in installed_versions(["gpipe-suite", "torch", "ray", "deepspeed"]).items():
        print(package, found or "not installed")
    print("Python", sys.version.split()[0])
    raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and exit")
]
