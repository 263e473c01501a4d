"""The commands for a Ray cluster: jobs, and the doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli_options import NONE_GIVEN, AddressOption, SetOption, console


def submit(
    name: Annotated[str, typer.Argument(help="an experiment or a sweep")] = "",
    address: AddressOption = "",
    scale: Annotated[str, typer.Option(help="scale of the experiment or sweep")] = "auto",
    settings: SetOption = NONE_GIVEN,
    storage: Annotated[
        str, typer.Option(help="a folder that all nodes share; empty: GPIPE_STORAGE there, or a single node's home")
    ] = "",
    job: Annotated[str, typer.Option(help="name of the job; empty: the experiment's name and the time")] = "",
    run: Annotated[str, typer.Option(help="resume this run from the cluster's storage, instead of a name")] = "",
) -> None:
    """Run an experiment or a sweep as a job on a Ray cluster, and follow it; `ray job` lists and stops jobs."""
    from launch.jobs.submit import JobRequest
    from launch.jobs.submit import submit as submit_job

    raise typer.Exit(submit_job(JobRequest(name, scale, " ".join(settings), run, storage, job), address, console))


def doctor(
    address: Annotated[
        str, typer.Option(help="a dashboard (head:8265) or Ray itself (head:6379); empty: RAY_ADDRESS or this machine")
    ] = "",
    storage: Annotated[str, typer.Option(help="folder for the runs, shared by all nodes; empty: ./runs")] = "",
) -> None:
    """Check this machine or a Ray cluster before a run; exit code 1 if there is a fault."""
    from launch.jobs.client import is_dashboard

    if is_dashboard(address):
        from launch.jobs.submit import submit_doctor

        raise typer.Exit(submit_doctor(address, storage, console))
    from launch.diagnostics.command import doctor as run_checks

    raise typer.Exit(not run_checks(address, storage, console))


COMMANDS = (submit, doctor)
