"""The commands for runs that exist: their checkpoints, state and scores, and their models."""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.base.hints import option
from launch.cli_options import NONE_GIVEN, CheckpointOption, ScaleOption, ScoreSetOption, SetOption, console
from suite.errors import SettingError


def checkpoints(run: str) -> None:
    """List a run's checkpoints and verify all their files; exit code 1 if none is valid."""
    from launch.runs.checkpoints import print_checkpoints

    raise typer.Exit(not print_checkpoints(run, console))


def runs(name: Annotated[str, typer.Argument(help="part of a name, or one run; empty: all runs")] = "") -> None:
    """List the runs here with their state, step, loss and speed, newest first; or describe one run."""
    from launch.watching.run_listing import print_runs

    print_runs(name, console)


def score(run: str, settings: ScoreSetOption = NONE_GIVEN, checkpoint: CheckpointOption = "") -> None:
    """Score a trained run: BLEU and chrF per language and direction, on held-out test pairs."""
    from launch.inference.score import score_from_cli
    from suite.training.checkpoint import parse_choice

    score_from_cli(run, " ".join(settings), console, parse_choice(checkpoint))


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


def export(run: str, checkpoint: CheckpointOption = "") -> None:
    """Export a trained run's model: safetensors, tokenizer, sizes. A model of transformers leaves as it came in."""
    from launch.inference.export import export as export_run
    from suite.training.checkpoint import parse_choice

    export_run(run, console, parse_choice(checkpoint))


def diff(
    name: Annotated[str, typer.Argument(help="an experiment, trained with --a and with --b")] = "",
    a: Annotated[
        list[str], typer.Option(help='settings, such as "pipeline.stages=1"; or plain: no pipeline')
    ] = NONE_GIVEN,
    b: Annotated[
        list[str], typer.Option(help='settings, such as "pipeline.stages=2 pipeline.schedule=1f1b"')
    ] = NONE_GIVEN,
    settings: SetOption = NONE_GIVEN,
    run: Annotated[
        list[str],
        typer.Option(
            help="instead: two runs with fingerprints, given twice or with a blank between them; or one, to train its "
            "last steps again"
        ),
    ] = NONE_GIVEN,
    steps: Annotated[int, typer.Option(help="how many are trained")] = 2,
    scale: ScaleOption = "auto",
) -> None:
    """Find the first tensor by which two settings of an experiment differ, or two runs; or whether a run's last steps
    still have the same bits. Exit code 1 if they differ by more than rounding, or in a bit."""
    from launch.diff.command import diff_runs, diff_settings
    from launch.diff.repeat import repeat
    from launch.diff.short_training import ShortTraining

    runs, own_a, own_b = " ".join(run).split(), " ".join(a), " ".join(b)
    if bool(name) == bool(runs) or (runs and (own_a or own_b or "".join(settings))):
        ways = f"{option('A')} and {option('B')}, or one or two runs with {option('RUN', '...')}"
        raise SettingError(f"give an experiment with {ways}")
    if len(runs) == 1:
        raise typer.Exit(not repeat(runs[0], steps, console))
    training = ShortTraining(name, scale, steps, " ".join(settings))
    found = diff_runs(runs, console) if runs else diff_settings(training, own_a, own_b, console)
    raise typer.Exit(not found.is_explained)


def check(
    name: str,
    settings: SetOption = NONE_GIVEN,
    steps: Annotated[int, typer.Option(help="how many are trained")] = 2,
    scale: ScaleOption = "auto",
) -> None:
    """Check that an experiment trains in pipelines as in plain PyTorch, to the bit or up to rounding; exit code 1 if it
    does not."""
    from launch.diff.check import check as check_experiment
    from launch.diff.short_training import ShortTraining

    raise typer.Exit(not check_experiment(ShortTraining(name, scale, steps, " ".join(settings)), console))


COMMANDS = (checkpoints, runs, score, sync, translate, generate, export, diff, check)
