"""``make export RUN=... FORMAT=huggingface``: writes a trained run's model as a folder that ``transformers`` loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

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
from launch.inference.model_text import load_data
from launch.runs.checkpoints import described_checkpoint, kind_of_checkpoint
from launch.runs.store import RunFolder, find_run, run_lock
from suite.data.documents.tokens import TokenData
from suite.data.text.text import TextData
from suite.errors import SettingError, nearest
from suite.paths import read_json
from suite.training.checkpoint import Checkpoint, Choice, values_of

FORMATS = ("huggingface",)


def export(requested: str, export_format: str, console: Console, choice: Choice = None) -> Path:
    """Writes ``<run>/huggingface/`` and returns it.

    Raises SettingError for an unknown format or while another process exports the run, CheckpointError for a run
    without a valid checkpoint. A run in training can be exported.
    """
    if export_format not in FORMATS:
        raise SettingError(f"unknown format {export_format!r}; {nearest(export_format, FORMATS)}")
    run = find_run(requested)
    folder = run.path / export_format
    with run_lock(run.path, f"{export_format}.lock"):
        experiment = read_experiment_file(run.experiment)
        save = _saver(run, experiment, console, choice)

        def write(checkpoint: Checkpoint) -> tuple[str, str]:
            with _complete(folder) as draft:
                return save(draft, checkpoint)

        step, (size, remark) = from_first_valid(run, experiment, choice, console.print, write)
        used = described_checkpoint(step, kind_of_checkpoint(run, experiment, step))
        console.print(f"{used}{size}: {folder}")
        if remark:
            console.print(remark)
    return folder


Save = Callable[[Path, Checkpoint], tuple[str, str]]
"""Writes a checkpoint's model to a folder; returns the model's size in words, and a remark, each if there is one."""


def _saver(run: RunFolder, experiment: Experiment, console: Console, choice: Choice) -> Save:
    """Returns how a run's model is written. Raises SettingError for a run whose models cannot be exported."""
    if isinstance(experiment, CustomExperiment):
        return partial(_save_causal_lm, list(experiment.spec.layers))
    if isinstance(experiment, LanguageModelExperiment):
        return partial(_save_language_model, experiment, load_data(run, experiment, TokenData, console, choice))
    text_run = find_text_run(run)
    data = load_data(run, text_run, TextData, console, choice)
    return partial(_save_translation, text_run, data, read_json(run.scores))


def _save_causal_lm(layers: list[nn.Module], draft: Path, checkpoint: Checkpoint) -> tuple[str, str]:
    """Writes a model of ``load_causal_lm`` back."""
    others = save_causal_lm(draft, layers, lambda layer: values_of(checkpoint.read(layer)))
    if not others:
        return "", ""
    return "", f"{len(others)} files and folders of the model before training are not copied: {', '.join(others)}"


def _save_language_model(
    experiment: LanguageModelExperiment, data: TokenData, draft: Path, checkpoint: Checkpoint
) -> tuple[str, str]:
    parameters = save_language_model(draft, experiment, data, checkpoint.step, _all_layers(experiment, checkpoint))
    return f", {parameters:,} parameters", ""


def _save_translation(
    experiment: TranslationExperiment,
    data: TextData,
    scores: dict[str, Any] | None,
    draft: Path,
    checkpoint: Checkpoint,
) -> tuple[str, str]:
    model = exported_model(experiment, _all_layers(experiment, checkpoint))
    model.config.register_for_auto_class()  # type: ignore[no-untyped-call]
    model.register_for_auto_class("AutoModelForSeq2SeqLM")  # type: ignore[no-untyped-call]
    model.save_pretrained(draft)
    exported_tokenizer(data).save_pretrained(draft)
    (draft / "README.md").write_text(model_card(experiment, data, checkpoint.step, model.num_parameters(), scores))
    return f", {model.num_parameters():,} parameters", ""


def _all_layers(experiment: Experiment, checkpoint: Checkpoint) -> dict[int, dict[str, Tensor]]:
    return {layer: values_of(checkpoint.read(layer)) for layer in range(experiment.list_length)}


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
