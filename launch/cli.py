"""The command line of the GPipe suite; the targets of the Makefile call it.

Exit codes:
0: done
1: no checkpoint is valid, a run of a sweep failed, the doctor found a fault,
two runs differ by more than rounding, or the suite has a defect (see its log)
2: an error that the user can fix
130, 143: interrupted by SIGINT, SIGTERM
"""

from __future__ import annotations

from typing import Annotated

from launch import entry, interrupts

if interrupts.is_command_line():  # before the slow imports
    entry.prepare()

import typer

from experiments.base.hints import option
from experiments.names import AMOEBANET, SWEEP_NAMES, TRANSFORMER, check_experiment, check_sweep, experiment_names
from launch import catalog
from launch import cli_options as options
from launch.cli_options import NONE_GIVEN, choice, console, error_console
from launch.runs.store import find_run
from suite.errors import SettingError, check_known

# Each command checks names before it imports what it calls: torch alone takes seconds.

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _common_options(version: options.VersionOption = False) -> None: ...


@app.command("list")
def list_experiments() -> None:
    """List the experiments, with their sizes in the paper."""
    console.print(catalog.experiments_table())


@app.command()
def experiment(
    name: options.ExperimentArgument = "",
    scale: options.ScaleOption = "auto",
    settings: options.SetOption = NONE_GIVEN,
    launcher: options.LauncherOption = "ray",
) -> None:
    """Run an experiment: prepare its data, train, evaluate, summarize."""
    if launcher != "env":  # of whose processes only the first is to speak
        check_experiment(name)
    from launch.backends.env_ranks import run_command
    from launch.train.command import start

    run_command(launcher, lambda: start(name, scale, " ".join(settings), launcher, console))


@app.command()
def resume(
    run: str,
    settings: options.SetOption = NONE_GIVEN,
    launcher: options.LauncherOption = "ray",
    checkpoint: options.ResumedOption = "",
) -> None:
    """Resume a run from its newest valid checkpoint, or from another one, with the same or another K and R."""
    if launcher != "env":
        find_run(run)
    from launch.backends.env_ranks import run_command
    from launch.train.command import resume as resume_run
    from suite.training.checkpoint import parse_choice

    run_command(launcher, lambda: resume_run(run, " ".join(settings), launcher, console, parse_choice(checkpoint)))


@app.command()
def plan(
    name: options.ExperimentArgument = "",
    cluster: Annotated[str, typer.Option(help="such as 16x16GiB or 2x8xH100; empty: RAY_ADDRESS or this machine")] = "",
    scale: options.ScaleOption = "auto",
    settings: options.SetOption = NONE_GIVEN,
    form: Annotated[options.PlanFormat, choice("--format", options.PlanFormat, "text or one JSON object")] = "text",
    best: Annotated[bool, typer.Option("--best", help="the fastest K, R, M, schedule and recomputes")] = False,
) -> None:
    """Estimate a run's step time and memory, and whether it fits, without running it."""
    check_experiment(name, (TRANSFORMER, AMOEBANET))
    from launch.planning.command import print_plan

    print_plan(name, cluster, scale, " ".join(settings), form, best, console)


@app.command()
def table(
    name: options.NameArgument = "",
    run: Annotated[str, typer.Option(help="run for breakdown; empty: the latest")] = "",
) -> None:
    """Make a table: 1 to 5 of the paper, and those that `table` without a name lists."""
    if not name:
        console.print(catalog.tables())
        return
    check_known("table", name, catalog.TABLES)
    if run:
        find_run(run)
    from launch.tables import table as make_table

    make_table(name, run, console)


@app.command()
def sweep(
    name: options.NameArgument = "",
    scale: Annotated[str, typer.Option(help="auto, or a scale of the sweep: laptop, tiny, paper")] = "auto",
    launcher: options.SweepLauncherOption = "local",
) -> None:
    """Run a sweep and report its results: depth_width, capacity, batch_size, temperature, bilingual, low_resource,
    romance, trainability, transfer."""
    if not name:
        console.print(catalog.sweeps())
        return
    check_sweep(name)
    from launch.sweeps.command import sweep as run_sweep

    failures = run_sweep(name, scale, launcher, console)
    for sentence in failures:
        error_console.print(sentence)
    raise typer.Exit(bool(failures))


@app.command()
def report(
    name: Annotated[str, typer.Argument(help="a sweep; empty: all that have runs")] = "",
    scale: Annotated[str, typer.Option(help="auto: every scale that has runs")] = "auto",
    run: Annotated[str, typer.Option(help="the page of this run instead")] = "",
) -> None:
    """Write the report of a sweep, or with --run the page of a run."""
    if run.strip():
        if name:
            raise SettingError(f"both the sweep {name!r} and --run are given; give one of them")
        find_run(run)
        from launch.watching.report import report_run

        report_run(run, console)
        return
    if name:
        check_sweep(name)
    from launch.sweeps.command import report as write_report

    write_report(name, scale, console)


@app.command()
def runs(name: Annotated[str, typer.Argument(help="part of a name, or one run; empty: all runs")] = "") -> None:
    """List the runs here with their state, step, loss and speed, newest first; or describe one run."""
    from launch.watching.run_listing import print_runs

    print_runs(name, console)


@app.command()
def checkpoints(run: str) -> None:
    """List a run's checkpoints and verify all their files; exit code 1 if none is valid."""
    find_run(run)
    from launch.runs.checkpoints import print_checkpoints

    raise typer.Exit(not print_checkpoints(run, console))


@app.command()
def score(run: str, settings: options.ScoreSetOption = NONE_GIVEN, checkpoint: options.CheckpointOption = "") -> None:
    """Score a trained run: BLEU and chrF per language and direction, on held-out test pairs."""
    find_run(run)
    from launch.inference.score import score_from_cli
    from suite.training.checkpoint import parse_choice

    score_from_cli(run, " ".join(settings), console, parse_choice(checkpoint))


@app.command()
def translate(
    run: str,
    text: Annotated[str, typer.Argument(help="a text, or several lines; empty: lines on standard input")] = "",
    *,
    to: Annotated[str, typer.Option(help="target language, such as de")],
    checkpoint: options.CheckpointOption = "",
) -> None:
    """Translate a text with a trained run's model."""
    find_run(run)
    from launch.inference.translate import translate as translate_text
    from suite.training.checkpoint import parse_choice

    translate_text(run, to, text, console, parse_choice(checkpoint))


@app.command()
def generate(
    run: str,
    text: Annotated[str, typer.Argument(help="a prompt; empty: one per line on standard input")] = "",
    tokens: Annotated[int | None, typer.Option(help="most new tokens; empty: up to the row's end")] = None,
    temperature: Annotated[float, typer.Option(help="divides the logits; 0: the most probable token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="sample among so many most probable tokens; empty: all")] = None,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
    checkpoint: options.CheckpointOption = "",
) -> None:
    """Continue a text with a trained language model."""
    find_run(run)
    from launch.inference.decoding_methods import Request
    from launch.inference.generate import generate as generate_text
    from suite.training.checkpoint import parse_choice

    generate_text(run, text, Request(tokens, temperature, top_k, seed), console, parse_choice(checkpoint))


@app.command()
def export(run: str, checkpoint: options.CheckpointOption = "") -> None:
    """Export a trained run's model: safetensors, tokenizer, sizes. A model of transformers leaves as it came in."""
    find_run(run)
    from launch.inference.export import export as export_run
    from suite.training.checkpoint import parse_choice

    export_run(run, console, parse_choice(checkpoint))


@app.command()
def sync(run: Annotated[str, typer.Argument(help="empty: all runs")] = "") -> None:
    """Upload what runs recorded offline to wandb."""
    from launch.tracking.wandb_sync import sync as sync_runs

    sync_runs(run, console)


@app.command()
def check(
    name: str,
    settings: options.SetOption = NONE_GIVEN,
    steps: options.StepsOption = 2,
    scale: options.ScaleOption = "auto",
) -> None:
    """Check that an experiment trains in pipelines as in plain PyTorch, to the bit or up to rounding; exit code 1 if it
    does not."""
    check_experiment(name)
    from launch.diff.check import check as check_training
    from launch.diff.short_training import ShortTraining

    raise typer.Exit(not check_training(ShortTraining(name, scale, steps, " ".join(settings)), console))


@app.command()
def diff(
    name: Annotated[str, typer.Argument(help="an experiment, trained with --a and with --b")] = "",
    a: options.SideOption = NONE_GIVEN,
    b: options.SideOption = NONE_GIVEN,
    settings: options.SetOption = NONE_GIVEN,
    run: Annotated[
        list[str],
        typer.Option(
            help="instead: two runs with fingerprints, given twice or with a blank between them; or one, to train its "
            "last steps again"
        ),
    ] = NONE_GIVEN,
    steps: options.StepsOption = 2,
    scale: options.ScaleOption = "auto",
) -> None:
    """Find the first tensor by which two settings of an experiment differ, or two runs; or whether a run's last steps
    still have the same bits. Exit code 1 if they differ by more than rounding, or in a bit."""
    runs, own_a, own_b = " ".join(run).split(), " ".join(a), " ".join(b)
    if bool(name) == bool(runs) or (runs and (own_a or own_b or "".join(settings))):
        ways = f"{option('A')} and {option('B')}, or one or two runs with {option('RUN', '...')}"
        raise SettingError(f"give an experiment with {ways}")
    if len(runs) > 2:
        raise SettingError(f"{len(runs)} runs are given; give one or two")
    for each in runs:
        find_run(each)
    if name:
        check_experiment(name)
    from launch.diff.command import diff_runs, diff_settings
    from launch.diff.repeat import repeat
    from launch.diff.short_training import ShortTraining

    if len(runs) == 1:
        raise typer.Exit(not repeat(runs[0], steps, console))
    training = ShortTraining(name, scale, steps, " ".join(settings))
    found = diff_runs(runs, console) if runs else diff_settings(training, own_a, own_b, console)
    raise typer.Exit(not found.is_explained)


@app.command("settings")
def print_settings(
    name: Annotated[str, typer.Argument(autocompletion=experiment_names, help="empty: no values")] = "",
    scale: options.ScaleOption = "auto",
    settings: options.SetOption = NONE_GIVEN,
    form: Annotated[options.SettingsFormat, choice("--format", options.SettingsFormat, "text, or Markdown")] = "text",
) -> None:
    """Print every setting with its type, default, unit and description, and its value in an experiment."""
    if name:
        check_experiment(name)
    from launch.planning import settings as listing

    listing.print_settings(name, scale, " ".join(settings), form, console)


@app.command()
def submit(
    name: Annotated[str, typer.Argument(help="an experiment or a sweep")] = "",
    address: options.AddressOption = "",
    scale: Annotated[str, typer.Option(help="scale of the experiment or sweep")] = "auto",
    settings: options.SetOption = NONE_GIVEN,
    storage: Annotated[
        str, typer.Option(help="a folder that all nodes share; empty: GPIPE_STORAGE there, or a single node's home")
    ] = "",
    job: Annotated[str, typer.Option(help="name of the job; empty: the experiment's name and the time")] = "",
    run: Annotated[str, typer.Option(help="resume this run from the cluster's storage, instead of a name")] = "",
) -> None:
    """Run an experiment or a sweep as a job on a Ray cluster, and follow it; `ray job` lists and stops jobs."""
    if not run and name:
        check_experiment(name, (TRANSFORMER, *SWEEP_NAMES))
    from launch.jobs import submit as jobs

    request = jobs.JobRequest(name, scale, " ".join(settings), run, storage, job)
    raise typer.Exit(jobs.submit(request, address, console))


@app.command()
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


def main() -> None:
    entry.run(app)


if __name__ == "__main__":
    main()
