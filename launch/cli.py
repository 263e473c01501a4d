"""The one command line. The Makefile is a thin face of it; new behaviour is a field of an experiment, not an option.

Exit codes: 0 done, 1 a benchmark found wrong gradients, no checkpoint is whole, a run of a sweep failed, the doctor
found a fault, or the suite has a defect (one sentence; the traceback is in a log), 2 a fault the user can mend (one
sentence, no traceback), 130 interrupted (one sentence).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

from launch import interrupts

if interrupts.is_command_line():  # before what takes time to import
    interrupts.install()

import typer
from rich.console import Console

from launch.error_log import log_error
from suite.errors import SettingError, SuiteError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(markup=False, highlight=False, soft_wrap=True)
complaints = Console(stderr=True, style="red", markup=False, highlight=False, soft_wrap=True)


class Scale(StrEnum):
    """What ``--scale`` may be."""

    auto = "auto"
    paper = "paper"
    laptop = "laptop"


class Launcher(StrEnum):
    """Who starts the workers."""

    ray = "ray"
    spawn = "spawn"


class Form(StrEnum):
    """How a plan is printed."""

    text = "text"
    json = "json"


ScaleOption = Annotated[Scale, typer.Option(help="paper: the printed numbers; laptop: shrunk by experiments/scales.py")]
SetOption = Annotated[str, typer.Option("--set", help='settings, as in "train.steps=50 pipeline.stages=4"')]
NameArgument = Annotated[str, typer.Argument(help="empty: list what there is")]
LauncherOption = Annotated[Launcher, typer.Option(help="ray, or plain processes of this machine")]


@app.command()
def experiment(
    name: NameArgument = "",
    scale: ScaleOption = Scale.auto,
    settings: SetOption = "",
    launcher: LauncherOption = Launcher.ray,
) -> None:
    """Run an experiment by name: prepare the text, train, evaluate, summarise."""
    if not name:
        list_experiments()
        console.print("which one? Name it with NAME=")
        return
    from launch import session

    session.start(name, scale.value, settings, launcher.value, console)


@app.command()
def resume(run: str, settings: SetOption = "", launcher: LauncherOption = Launcher.ray) -> None:
    """Take a run up again from its newest whole checkpoint, at the same or another K and R."""
    from launch import session

    session.resume(run, settings, launcher.value, console)


@app.command()
def checkpoints(run: str) -> None:
    """List a run's checkpoints and verify every file of them; exit code 1 when none is whole."""
    from launch import checkpoints as listing

    if not listing.checkpoints(run, console):
        raise typer.Exit(1)


@app.command()
def plan(
    name: NameArgument = "",
    cluster: Annotated[str, typer.Option(help="such as 16x16GiB, 2x8xH100; empty: RAY_ADDRESS, or this machine")] = "",
    scale: ScaleOption = Scale.auto,
    settings: SetOption = "",
    form: Annotated[Form, typer.Option("--format", help="text, or one JSON object")] = Form.text,
) -> None:
    """Say what a run would cost and whether it fits, without running it."""
    if not name:
        list_experiments()
        console.print("which one? Name it with NAME=; also transformer_<L> and amoebanet_<L>x<D>")
        return
    from launch import planning

    planning.plan(name, cluster, scale.value, settings, form.value, console)


@app.command()
def table(
    name: NameArgument = "", run: Annotated[str, typer.Option(help="of the breakdown; empty: the newest")] = ""
) -> None:
    """Make one of the paper's tables: 1, 2, 3, 4, 5, partition, breakdown, efficiency, prediction,
    slow_links."""
    if not name:
        from launch import listing

        console.print(listing.tables())
        return
    from launch import tables

    tables.table(name, run, console)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="sleeping, layers, translation, replicas, all")] = "all") -> None:
    """Time the suite beside other pipelines, on the same work in the same processes."""
    from launch import bench as benchmark

    wrong = benchmark.bench(name, console)
    for sentence in wrong:
        complaints.print(f"wrong: {sentence}")
    if wrong:
        raise typer.Exit(1)


@app.command()
def sweep(
    name: NameArgument = "",
    scale: Annotated[str, typer.Option(help="auto, or one that the sweep has: laptop, gpu, tiny, paper")] = "auto",
    launcher: LauncherOption = Launcher.spawn,
) -> None:
    """Run a family of runs and report on it: depth_width, capacity, batch_size, temperature, bilingual, trainability,
    transfer."""
    if not name:
        from launch import listing

        console.print(listing.sweeps())
        return
    from launch.sweeps import sweep as sweeps

    failures = sweeps.sweep(name, scale, launcher.value, console)
    for sentence in failures:
        complaints.print(sentence)
    if failures:
        raise typer.Exit(1)


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="a sweep; empty: all that have runs")] = "",
    scale: Annotated[str, typer.Option(help="auto: every scale that has runs")] = "auto",
) -> None:
    """Report on a sweep from the records and scores of its runs: one HTML page, and Markdown."""
    from launch.sweeps import report as reports

    reports.report(name, scale, console)


@app.command()
def score(run: str, settings: SetOption = "") -> None:
    """Score a trained run: BLEU and chrF a language and direction, on held-out test pairs."""
    from launch import scoring

    scoring.score_typed(run, settings, console)


@app.command()
def sync(run: Annotated[str, typer.Argument(help="empty: all runs")] = "") -> None:
    """Upload what runs recorded for wandb without a server."""
    from launch import syncing

    syncing.sync(run, console)


@app.command()
def translate(run: str, text: str, to: Annotated[str, typer.Option(help="the language to write, such as de")]) -> None:
    """Translate a text by a trained run's model."""
    from launch import translating

    translating.translate(run, to, text, console)


@app.command()
def export(run: str, form: Annotated[str, typer.Option("--format", help="huggingface")] = "huggingface") -> None:
    """Write a trained run's model as a folder that transformers loads."""
    from launch import exporting

    exporting.export(run, form, console)


@app.command("gpu-check")
def check_gpu() -> None:
    """Check one GPU: gradients against the CPU's, training steps beside the plan's, faster ways; needs no text."""
    from launch import gpu_check

    gpu_check.check(console.print, lambda table: console.print(table.shown()), "gpipe gpu-check")


AddressOption = Annotated[str, typer.Option(help="of the cluster's dashboard; empty: RAY_API_SERVER_ADDRESS")]


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="an experiment or a sweep")] = "",
    address: AddressOption = "",
    scale: Annotated[str, typer.Option(help="as of the experiment or the sweep")] = "auto",
    settings: SetOption = "",
    storage: Annotated[str, typer.Option(help="a folder that all nodes share, or a URL; one node needs none")] = "",
    job: Annotated[str, typer.Option(help="its name; empty: what it runs, and the time of day")] = "",
    run: Annotated[str, typer.Option(help="take this run on the cluster's storage up again, instead of a name")] = "",
    send_key: Annotated[
        bool, typer.Option("--send-key", help="send WANDB_API_KEY without a token, or over plain http, too")
    ] = False,
) -> None:
    """Run an experiment or a sweep as a job on a Ray cluster, and follow it."""
    from launch.jobs.submit import submit

    raise typer.Exit(submit(name, address, scale, settings, storage, job, run, send_key, console))


@app.command()
def jobs(address: AddressOption = "") -> None:
    """List the jobs of this suite on a Ray cluster."""
    from launch.jobs import listing

    listing.jobs(address, console)


@app.command()
def logs(job: Annotated[str, typer.Argument()] = "", address: AddressOption = "") -> None:
    """Follow a job on a Ray cluster to its end; the exit code is the job's."""
    from launch.jobs import follow

    raise typer.Exit(follow.logs(address, job, console))


@app.command()
def stop(job: Annotated[str, typer.Argument()] = "", address: AddressOption = "") -> None:
    """End a job on a Ray cluster; its run can be resumed."""
    from launch.jobs import listing

    listing.stop(address, job, console)


@app.command()
def fetch(job: Annotated[str, typer.Argument()] = "", address: AddressOption = "") -> None:
    """Fetch what a job's runs left on the cluster, checkpoints aside, into runs/."""
    from launch.jobs import fetch

    fetch.fetch(address, job, console)


@app.command()
def doctor(
    address: Annotated[
        str,
        typer.Option(help="a dashboard, head:8265, or Ray itself, head:6379; empty: RAY_ADDRESS, or this machine"),
    ] = "",
    storage: Annotated[str, typer.Option(help="folder or URL that runs will be kept at; empty: ./runs")] = "",
) -> None:
    """Examine this machine or a Ray cluster before a run; exit code 1 when there is a fault."""
    from launch.jobs.door import is_dashboard

    if is_dashboard(address):
        from launch.jobs.submit import submit_doctor

        raise typer.Exit(submit_doctor(address, storage, console))
    from launch.doctor import doctor as examination

    if not examination.doctor(address, storage, console):
        raise typer.Exit(1)


@app.command("list")
def list_experiments() -> None:
    """List the experiments: what they are, and the paper's numbers."""
    from launch.listing import table

    console.print(table())


def main() -> None:
    """Runs the command line and exits: a user's fault becomes one sentence and exit code 2, any other exception one
    sentence and exit code 1, an interrupt one sentence and exit code 130."""
    code = 1
    try:
        with _as_job():  # what a job left is copied also after an interrupt
            code = _exit_code()
    except BaseException as error:
        if not interrupts.received():
            sentence, code = _answer(error)
            complaints.print(f"error: {sentence}")
    if interrupts.received():
        interrupts.leave()
    if interrupts.is_command_line():
        interrupts.ignore()
    sys.exit(code)


def _exit_code() -> int:
    """Runs a command to its end."""
    try:
        with interrupts.command():
            _check_arguments()
            app()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException as error:
        if interrupts.received() or isinstance(error, KeyboardInterrupt):
            return interrupts.EXIT_CODE
        sentence, code = _answer(error)
        complaints.print(f"error: {sentence}")
        return code
    return 0


def _answer(error: BaseException) -> tuple[str, int]:
    """Returns the sentence that reports an exception, and the exit code."""
    if isinstance(error, SuiteError):
        return str(error), 2
    first = (str(error).strip().splitlines() or ["no message"])[0][:300]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"{error.filename or 'a file'} cannot be written: {error.strerror}; make room, and go on", 2
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return f"{error.filename or 'a file'} cannot be read or written: {error.strerror}; see who owns it", 2
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}... is too long for the name of a file; give a shorter one", 2
    log = log_error(error)
    where = f"its traceback is in {log}" if log else "its traceback could be written nowhere"
    return f"{type(error).__name__}: {first}; this is a defect of the suite, {where}", 1


def _check_arguments() -> None:
    """Raises SettingError for an argument that is no UTF-8: it could be neither written nor printed."""
    for at, argument in enumerate(sys.argv[1:], 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            byte = os.fsencode(argument[error.start])
            raise SettingError(
                f"argument {at} is no UTF-8 text: it has the byte 0x{byte.hex()} after {error.start} characters; "
                "convert it first, with iconv for instance"
            ) from None


@contextmanager
def _as_job() -> Iterator[None]:
    """A context for the command line. In a job on a cluster it has the key of who submitted it, and copies its runs to
    where they are to be kept; elsewhere it is nothing."""
    if "GPIPE_JOB" not in os.environ:
        yield
        return
    from launch.jobs.copies import copied
    from launch.jobs.secrets import take

    if gone := take():
        console.print(gone)
    with copied(console.print):
        yield


if __name__ == "__main__":
    main()
