"""The commands for runs that exist: their checkpoints, state and scores, and their models."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from launch.cli_options import CheckpointOption, ScaleOption, ScoreSetOption, SetOption, console
from suite.errors import SettingError


def checkpoints(run: str) -> None:
    """List a run's checkpoints and verify all their files; exit code 1 if none is valid."""
    from launch.runs.checkpoints import print_checkpoints

    if not print_checkpoints(run, console):
        raise typer.Exit(1)


def runs(name: Annotated[str, typer.Argument(help="part of a name, or one run; empty: all runs")] = "") -> None:
    """List the runs here with their state, step, loss and speed, newest first; or describe one run."""
    from launch.watching.run_listing import print_runs

    print_runs(name, console)


def watch(run: str) -> None:
    """Follow a run that trains, from another terminal: its steps, and what each stage does now."""
    from launch.watching.watch import watch as watch_run

    watch_run(run, console)


def score(run: str, settings: ScoreSetOption = "", checkpoint: CheckpointOption = "") -> None:
    """Score a trained run: BLEU and chrF per language and direction, on held-out test pairs."""
    from launch.inference.score import score_from_cli
    from suite.training.checkpoint import parse_choice

    score_from_cli(run, settings, console, parse_choice(checkpoint))


def sync(run: Annotated[str, typer.Argument(help="empty: all runs")] = "") -> None:
    """Upload what runs recorded offline to wandb."""
    from launch.tracking.wandb_sync import sync as sync_runs

    sync_runs(run, console)


def translate(
    run: str,
    text: Annotated[str, typer.Argument(help="a text, or several lines; empty: lines on standard input")] = "",
    *,
    to: Annotated[str, typer.Option(help="target language, such as de")],
    checkpoint: CheckpointOption = "",
) -> None:
    """Translate a text with a trained run's model."""
    from launch.inference.translate import translate as translate_text
    from suite.training.checkpoint import parse_choice

    translate_text(run, to, text, console, parse_choice(checkpoint))


def generate(
    run: str,
    text: Annotated[str, typer.Argument(help="a prompt; empty: one per line on standard input")] = "",
    tokens: Annotated[int | None, typer.Option(help="most new tokens; empty: up to the row's end")] = None,
    temperature: Annotated[float, typer.Option(help="divides the logits; 0: the most probable token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="sample among so many most probable tokens; empty: all")] = None,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
    checkpoint: CheckpointOption = "",
) -> None:
    """Continue a text with a trained language model."""
    from launch.inference.decoding_methods import Request
    from launch.inference.generate import generate as generate_text
    from suite.training.checkpoint import parse_choice

    generate_text(run, text, Request(tokens, temperature, top_k, seed), console, parse_choice(checkpoint))


def export(
    run: str,
    form: Annotated[str, typer.Option("--format", help="huggingface")] = "huggingface",
    checkpoint: CheckpointOption = "",
) -> None:
    """Export a trained run's model as a folder that Hugging Face transformers loads."""
    from launch.inference.export import export as export_run
    from suite.training.checkpoint import parse_choice

    export_run(run, form, console, parse_choice(checkpoint))


def diff(
    name: Annotated[str, typer.Argument(help="an experiment, trained with --a and with --b")] = "",
    a: Annotated[str, typer.Option("--a", help='settings, such as "pipeline.stages=1"; or plain: no pipeline')] = "",
    b: Annotated[str, typer.Option("--b", help='settings, such as "pipeline.stages=2 pipeline.schedule=1f1b"')] = "",
    checkout: Annotated[str, typer.Option(help="in place of --b: a folder with other code of the suite")] = "",
    settings: SetOption = "",
    run: Annotated[
        list[str],
        typer.Option(
            help="instead: two runs with fingerprints, given twice or with a blank between them; or one, to train its "
            "last steps again"
        ),
    ] = [],  # noqa: B006  # typer copies it
    steps: Annotated[int, typer.Option(help="how many are trained")] = 2,
    scale: ScaleOption = "auto",
) -> None:
    """Find the first tensor by which two settings of an experiment differ, its code here and elsewhere, or two runs; or
    whether a run's last steps still have the same bits. Exit code 1 if they differ by more than rounding, or in a
    bit."""
    from pathlib import Path

    from launch.diff.command import diff_checkouts, diff_runs, diff_settings
    from launch.diff.repeat import repeat
    from launch.diff.short_training import ShortTraining

    runs = " ".join(run).split()
    if bool(name) == bool(runs) or (runs and (a or b or settings or checkout)) or (b and checkout):
        raise SettingError("give an experiment with --a and --b or --checkout, or one or two runs with --run")
    if len(runs) == 1:
        if not repeat(runs[0], steps, console):
            raise typer.Exit(1)
        return
    training = ShortTraining(name, scale, steps, settings)
    if checkout:
        found = diff_checkouts(training, a, Path(checkout), console)
    else:
        found = diff_runs(runs, console) if runs else diff_settings(training, a, b, console)
    if not found.is_explained:
        raise typer.Exit(1)


def check(
    name: str,
    settings: SetOption = "",
    steps: Annotated[int, typer.Option(help="how many are trained")] = 2,
    scale: ScaleOption = "auto",
) -> None:
    """Check that an experiment trains in pipelines as in plain PyTorch, to the bit or up to rounding; exit code 1 if it
    does not."""
    from launch.diff.check import check as check_experiment
    from launch.diff.short_training import ShortTraining

    if not check_experiment(ShortTraining(name, scale, steps, settings), console):
        raise typer.Exit(1)


def replay(
    run: str,
    action: Annotated[
        str, typer.Option(help="such as B3, or B3.1 in a stage's second cell (suite/pipeline/schedule/action.py)")
    ],
    step: Annotated[int, typer.Option(help="counted from 1; a checkpoint of the step before must exist")],
    stage: Annotated[int, typer.Option(help="counted from 0")] = 0,
    replica: Annotated[int, typer.Option(help="counted from 0")] = 0,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="stop in Python's debugger before the layers, and before a backward")
    ] = False,
    save: Annotated[str, typer.Option(help="a file for the tensors")] = "",
) -> None:
    """Run one action of a run again, alone: its tensors, and whether they are what the run recorded; exit code 1 if
    not."""
    import pdb as debugger
    from bdb import BdbQuit
    from pathlib import Path

    from launch.diff.replay import ReplayedAction
    from launch.diff.replay import replay as replay_action
    from suite.pipeline.schedule.action import Action

    asked = ReplayedAction(step, replica, stage, Action.parse(action))
    stop = debugger.set_trace if pdb else None
    with suppress(BdbQuit):  # of a user who has seen enough
        if replay_action(run, asked, stop, Path(save) if save else None, console):
            return
    raise typer.Exit(1)


COMMANDS = (checkpoints, runs, watch, score, sync, translate, generate, export, diff, check, replay)
