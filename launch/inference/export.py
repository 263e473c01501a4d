"""``make export RUN=... FORMAT=huggingface``: writes a trained run's model as a folder that ``transformers`` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from torch import Tensor

from experiments.base.experiment import Experiment
from experiments.custom.experiment import CustomExperiment
from experiments.huggingface.card import model_card
from experiments.huggingface.causal_lm import save_causal_lm
from experiments.huggingface.convert import exported_model, exported_tokenizer
from experiments.huggingface.language_model import save_language_model
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.registry import read_experiment_file
from experiments.translation.experiment import TranslationExperiment
from launch.inference.decode import find_text_run
from launch.inference.model import from_first_valid
from launch.inference.model_text import load_documents, load_text
from launch.runs.checkpoints import described_checkpoint, kind_of_checkpoint
from launch.runs.store import RunFolder, find_run, run_lock
from suite.errors import SettingError, nearest
from suite.paths import read_json
from suite.training.checkpoint import Checkpoint, Choice, values_of

FORMATS = ("huggingface",)

T = TypeVar("T")


def export(requested: str, export_format: str, console: Console, choice: Choice = None) -> Path:
    """Writes ``<run>/huggingface/`` and returns it.

    Raises SettingError for an unknown format or while another process exports the run, CheckpointError for a run
    without a valid checkpoint. A run in training can be exported.
    """
    if export_format not in FORMATS:
        raise SettingError(f"unknown format {export_format!r}; {nearest(export_format, FORMATS)}")
    run = find_run(requested)
    with run_lock(run.path, f"{export_format}.lock"):
        return _export(run, export_format, console, choice)


def _export(run: RunFolder, export_format: str, console: Console, choice: Choice) -> Path:
    found = read_experiment_file(run.experiment)
    if isinstance(found, CustomExperiment):
        return _export_causal_lm(run, found, run.path / export_format, console, choice)
    if isinstance(found, LanguageModelExperiment):
        return _export_language_model(run, found, run.path / export_format, console, choice)
    return _export_translation(run, find_text_run(run), run.path / export_format, console, choice)


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yields a folder to write to; it replaces ``folder`` once all is written, so that an interrupted export keeps the
    previous one. What a user put beside the exported files, such as ``.git``, stays."""
    draft, previous = folder.with_suffix(".draft"), folder.with_suffix(".previous")
    _keep_own(previous, folder)  # of an export that was killed
    shutil.rmtree(draft, ignore_errors=True)
    yield draft
    mask = os.umask(0o077)
    os.umask(mask)
    for path in draft.iterdir():
        path.chmod(0o666 & ~mask)  # safetensors writes files that only this user can read
    if folder.exists():
        folder.rename(previous)
    draft.rename(folder)
    _keep_own(previous, folder)


def _keep_own(previous: Path, folder: Path) -> None:
    """Moves what the new export did not write from the previous one, without its weights, and removes the rest. Without
    a new export, moves the previous one back."""
    if not previous.exists():
        return
    if not folder.exists():
        previous.rename(folder)
        return
    for path in sorted(previous.iterdir()):
        is_weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not is_weights and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(previous)


def _export_translation(
    run: RunFolder, experiment: TranslationExperiment, folder: Path, console: Console, choice: Choice
) -> Path:
    data = load_text(run, experiment, console, choice)
    step, layers = _all_layers(run, experiment, console, choice)
    model = exported_model(experiment, layers)
    checkpoint = read_json(run.scores)
    with _complete(folder) as draft:
        model.config.register_for_auto_class()  # type: ignore[no-untyped-call]
        model.register_for_auto_class("AutoModelForSeq2SeqLM")  # type: ignore[no-untyped-call]
        model.save_pretrained(draft)
        exported_tokenizer(data).save_pretrained(draft)
        (draft / "README.md").write_text(model_card(experiment, data, step, model.num_parameters(), checkpoint))
    used = described_checkpoint(step, kind_of_checkpoint(run, experiment, step))
    console.print(f"{used}, {model.num_parameters():,} parameters: {folder}")
    return folder


def _export_language_model(
    run: RunFolder, experiment: LanguageModelExperiment, folder: Path, console: Console, choice: Choice
) -> Path:
    data = load_documents(run, experiment, console, choice)
    step, layers = _all_layers(run, experiment, console, choice)
    with _complete(folder) as draft:
        parameters = save_language_model(draft, experiment, data, step, layers)
    used = described_checkpoint(step, kind_of_checkpoint(run, experiment, step))
    console.print(f"{used}, {parameters:,} parameters: {folder}")
    return folder


def _all_layers(
    run: RunFolder, experiment: Experiment, console: Console, choice: Choice
) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """Returns the step of the first valid checkpoint and the values of its layers."""
    layers = range(experiment.list_length)
    return from_first_valid(
        run,
        experiment,
        choice,
        console.print,
        lambda checkpoint: {layer: values_of(checkpoint.read(layer)) for layer in layers},
    )


def _export_causal_lm(
    run: RunFolder, experiment: CustomExperiment, folder: Path, console: Console, choice: Choice
) -> Path:
    """Writes a model of ``load_causal_lm`` back, one layer at a time."""
    layers = list(experiment.spec.layers)

    def write(checkpoint: Checkpoint) -> list[str]:
        with _complete(folder) as draft:
            return save_causal_lm(draft, layers, lambda layer: values_of(checkpoint.read(layer)))

    step, others = from_first_valid(run, experiment, choice, console.print, write)
    console.print(f"{described_checkpoint(step, kind_of_checkpoint(run, experiment, step))}: {folder}")
    if others:
        console.print(
            f"{len(others)} files and folders of the model before training are not copied: {', '.join(others)}"
        )
    return folder
