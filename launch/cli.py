"""The command line of the GPipe suite; the targets of the Makefile call it.

Exit codes:
0: done
1: no checkpoint is valid, a run of a sweep failed, the doctor found a fault,
two runs differ by more than rounding, or the suite has a defect (see its log)
2: an error that the user can fix
130: interrupted
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from experiments.base.hints import command
from launch import interrupts

if interrupts.is_command_line():  # before the slow imports
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, and what is opened next would take its descriptor
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)
    interrupts.install()
    try:
        os.getcwd()
    except OSError as error:  # torch would not be found
        print(f"error: the current folder: {error.strerror}; was it removed? change to another", file=sys.stderr)
        sys.exit(2)

import typer

from launch import cli_cluster, cli_runs
from launch.cli_options import (
    NONE_GIVEN,
    ExperimentArgument,
    LauncherOption,
    NameArgument,
    PlanFormat,
    ScaleOption,
    SetOption,
    SettingsFormat,
    SweepLauncherOption,
    choice,
    console,
    error_console,
    experiment_names,
)
from launch.error_log import describe_error
from suite.errors import SettingError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


def _print_version(requested: bool) -> None:
    if not requested:
        return
    from launch.node_probe import installed_versions

    for package, found in installed_versions(["gpipe-suite", "torch", "ray", "deepspeed"]).items():
        print(package, found or "not installed")
    print("Python", sys.version.split()[0])
    raise typer.Exit


@app.callback()
def _common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and exit")
    ] = False,
) -> None: ...


@app.command()
def experiment(
    name: ExperimentArgument = "",
    scale: ScaleOption = "auto",
    settings: SetOption = NONE_GIVEN,
    launcher: LauncherOption = "ray",
) -> None:
    """Run an experiment: prepare its data, train, evaluate, summarize."""
    if not name:
        list_experiments()
        console.print(f"choose one: {command('experiment', NAME='...')}")
        return
    from launch.backends.env_ranks import run_command
    from launch.train.command import start

    run_command(launcher, lambda: start(name, scale, " ".join(settings), launcher, console))


@app.command()
def resume(
    run: str,
    settings: SetOption = NONE_GIVEN,
    launcher: LauncherOption = "ray",
    checkpoint: Annotated[
        str,
        typer.Option(metavar="<best|latest|STEP>", help="empty: the latest; those after the chosen one are abandoned"),
    ] = "",
) -> None:
    """Resume a run from its newest valid checkpoint, or from another one, with the same or another K and R."""
    from launch.backends.env_ranks import run_command
    from launch.train.command import resume as resume_run
    from suite.training.checkpoint import parse_choice

    if "GPIPE_JOB" in os.environ:
        from launch.jobs.in_job_upload import restore

        restore(run, console.print)
    run_command(launcher, lambda: resume_run(run, " ".join(settings), launcher, console, parse_choice(checkpoint)))


@app.command()
def plan(
    name: ExperimentArgument = "",
    cluster: Annotated[str, typer.Option(help="such as 16x16GiB or 2x8xH100; empty: RAY_ADDRESS or this machine")] = "",
    scale: ScaleOption = "auto",
    settings: SetOption = NONE_GIVEN,
    form: Annotated[PlanFormat, choice("--format", PlanFormat, "text or one JSON object")] = "text",
    best: Annotated[bool, typer.Option("--best", help="the fastest K, R, M, schedule and recomputes")] = False,
) -> None:
    """Estimate a run's step time and memory, and whether it fits, without running it."""
    if not name:
        list_experiments()
        console.print(f"choose one, transformer_<L> or amoebanet_<L>x<D>: {command('plan', NAME='...')}")
        return
    from launch.planning.command import print_plan

    print_plan(name, cluster, scale, " ".join(settings), form, best, console)


@app.command()
def table(
    name: NameArgument = "",
    run: Annotated[str, typer.Option(help="run for breakdown; empty: the latest")] = "",
) -> None:
    """Make a table: 1 to 5 of the paper, and those that `table` without a name lists."""
    if not name:
        from launch import catalog

        console.print(catalog.tables())
        return
    from launch.tables import table as make_table

    make_table(name, run, console)


@app.command()
def sweep(
    name: NameArgument = "",
    scale: Annotated[str, typer.Option(help="auto, or a scale of the sweep: laptop, tiny, paper")] = "auto",
    launcher: SweepLauncherOption = "local",
) -> None:
    """Run a sweep and report its results: depth_width, capacity, batch_size, temperature, bilingual, low_resource,
    romance, trainability, transfer."""
    if not name:
        from launch import catalog

        console.print(catalog.sweeps())
        return
    from launch.sweeps.command import sweep as run_sweep

    failures = run_sweep(name, scale, launcher, console)
    for sentence in failures:
        error_console.print(sentence)
    raise typer.Exit(bool(failures))


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="a sweep; empty: all that have runs")] = "",
    scale: Annotated[str, typer.Option(help="auto: every scale that has runs")] = "auto",
    run: Annotated[
        list[str], typer.Option(help="the page of this run instead; several, with blanks between, are compared")
    ] = NONE_GIVEN,
) -> None:
    """Write the report of a sweep, or with --run the page of a run, or of several runs compared."""
    if any(text.strip() for text in run):
        from launch.watching.report import report_runs

        if name:
            raise SettingError(f"both the sweep {name!r} and --run are given; give one of them")
        report_runs(run, console)
        return
    from launch.sweeps.command import report as write_report

    write_report(name, scale, console)


for other_command in (*cli_runs.COMMANDS, *cli_cluster.COMMANDS):
    app.command()(other_command)


@app.command("settings")
def print_settings(
    name: Annotated[str, typer.Argument(autocompletion=experiment_names, help="empty: no values")] = "",
    scale: ScaleOption = "auto",
    settings: SetOption = NONE_GIVEN,
    form: Annotated[SettingsFormat, choice("--format", SettingsFormat, "text, or Markdown")] = "text",
) -> None:
    """Print every setting with its type, default, unit and description, and its value in an experiment."""
    from launch.planning import settings as listing

    listing.print_settings(name, scale, " ".join(settings), form, console)


@app.command("list")
def list_experiments() -> None:
    """List the experiments, with their sizes in the paper."""
    from launch.catalog import experiments_table

    console.print(experiments_table())


def main() -> None:
    """Runs the command line and exits. Prints one sentence for an error of the user (exit code 2), for any other
    exception (1) and for an interrupt (130)."""
    code = 1
    try:
        with _as_job():  # copies the job's runs after an interrupt, too
            code = _run_command()
    except BaseException as error:
        if not interrupts.was_interrupted():
            message, code = describe_error(error)
            error_console.print(f"error: {message}")
    if interrupts.was_interrupted():
        interrupts.kill_children_and_exit()
    interrupts.leave(code)


def _run_command() -> int:
    """Runs a command; returns the exit code."""
    try:
        with interrupts.interruptible():
            _check_arguments()
            app()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        if interrupts.was_interrupted() or isinstance(error, KeyboardInterrupt):
            return interrupts.EXIT_CODE
        message, code = describe_error(error)
        error_console.print(f"error: {message}")
        return code
    return 0


def _check_arguments() -> None:
    """Raises SettingError for an argument that is not UTF-8: it could not be written or printed."""
    for at, argument in enumerate(sys.argv[1:], 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            byte = os.fsencode(argument[error.start])
            raise SettingError(
                f"argument {at} is not UTF-8: it has the byte 0x{byte.hex()} after {error.start} characters; "
                "convert it first, for example with iconv"
            ) from None


def _as_job() -> AbstractContextManager[None]:
    """A context that, in a job on a cluster, copies the job's runs to their storage. Elsewhere it does nothing."""
    if "GPIPE_JOB" not in os.environ:
        return nullcontext()
    from launch.jobs.in_job_upload import uploading

    return uploading(console.print)


if __name__ == "__main__":
    main()
