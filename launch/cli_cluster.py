"""The commands for a Ray cluster: jobs, and the doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli_options import NONE_GIVEN, AddressOption, JobArgument, SetOption, console


def submit(
    name: Annotated[str, typer.Argument(help="an experiment or a sweep")] = "",
    address: AddressOption = "",
    scale: Annotated[str, typer.Option(help="scale of the experiment or sweep")] = "auto",
    settings: SetOption = NONE_GIVEN,
    storage: Annotated[
        str, typer.Option(help="a folder that all nodes share, or a URL; not needed on a single node")
    ] = "",
    job: Annotated[str, typer.Option(help="name of the job; empty: the experiment's name and the time")] = "",
    run: Annotated[str, typer.Option(help="resume this run from the cluster's storage, instead of a name")] = "",
) -> None:
    """Run an experiment or a sweep as a job on a Ray cluster, and follow it."""
    from launch.jobs.submit import JobRequest
    from launch.jobs.submit import submit as submit_job

    request = JobRequest(name, scale, " ".join(settings), run, storage, job)
    raise typer.Exit(submit_job(request, address, console))


def jobs(address: AddressOption = "") -> None:
    """List this suite's jobs on a Ray cluster."""
    from launch.jobs.listing import jobs as list_jobs

    list_jobs(address, console)


def logs(job: JobArgument = "", address: AddressOption = "") -> None:
    """Follow the log of a job on a Ray cluster until it ends; the exit code is the job's."""
    from launch.jobs.logs import logs as follow_job

    raise typer.Exit(follow_job(address, job, console))


def stop(job: JobArgument = "", address: AddressOption = "") -> None:
    """Stop a job on a Ray cluster; its run can be resumed."""
    from launch.jobs.listing import stop as stop_job

    stop_job(address, job, console)


def fetch(job: JobArgument = "", address: AddressOption = "") -> None:
    """Copy the results of a job's runs from the cluster into runs/, without checkpoints."""
    from launch.jobs.fetch import fetch as fetch_job

    fetch_job(address, job, console)


def doctor(
    address: Annotated[
        str, typer.Option(help="a dashboard (head:8265) or Ray itself (head:6379); empty: RAY_ADDRESS or this machine")
    ] = "",
    storage: Annotated[str, typer.Option(help="folder or URL for the runs; empty: ./runs")] = "",
) -> None:
    """Check this machine or a Ray cluster before a run; exit code 1 if there is a fault."""
    from launch.jobs.client import is_dashboard

    if is_dashboard(address):
        from launch.jobs.submit import submit_doctor

        raise typer.Exit(submit_doctor(address, storage, console))
    from launch.diagnostics.command import doctor as run_checks

    raise typer.Exit(not run_checks(address, storage, console))


COMMANDS = (submit, jobs, logs, stop, fetch, doctor)
