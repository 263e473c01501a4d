"""``make export RUN=...``: writes a trained run's model as safetensors, with its tokenizer and its sizes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from experiments.base.experiment import Experiment
from experiments.custom.experiment import CustomExperiment
from experiments.huggingface.causal_lm import save_causal_lm
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
from suite.training.checkpoint import Checkpoint, Choice, values_of

Save = Callable[[Path, Checkpoint], str]
"""Writes a checkpoint's model to a folder; returns what is to be said of it, empty if nothing is."""


def export(requested: str, console: Console, choice: Choice = None) -> Path:
    """Writes ``<run>/export/`` and returns it.

    Raises SettingError while another process exports the run, CheckpointError for a run without a valid checkpoint. A
    run in training can be exported.
    """
    run = find_run(requested)
    folder = run.path / "export"
    with run_lock(run.path, "export.lock"):
        experiment = read_experiment_file(run.experiment)
        save = _saver(run, experiment, console, choice)

        def write(checkpoint: Checkpoint) -> str:
            with _complete(folder) as draft:
                return save(draft, checkpoint)

        step, remark = from_first_valid(run, experiment, choice, console.print, write)
        console.print(f"{described_checkpoint(step, kind_of_checkpoint(run, experiment, step))}: {folder}")
        if remark:
            console.print(remark)
    return folder


def _saver(run: RunFolder, experiment: Experiment, console: Console, choice: Choice) -> Save:
    """Returns how a run's model is written. Raises SettingError for a run whose models cannot be exported."""
    if isinstance(experiment, CustomExperiment):
        return partial(_save_causal_lm, list(experiment.spec.layers))
    if isinstance(experiment, LanguageModelExperiment):
        return partial(_save_weights, experiment, load_data(run, experiment, TokenData, console, choice))
    text_run = find_text_run(run)
    return partial(_save_weights, text_run, load_data(run, text_run, TextData, console, choice))


def _save_causal_lm(layers: list[nn.Module], draft: Path, checkpoint: Checkpoint) -> str:
    """Writes a model of ``load_causal_lm`` back."""
    others = save_causal_lm(draft, layers, lambda layer: values_of(checkpoint.read(layer)))
    if not others:
        return ""
    return f"{len(others)} files and folders of the model before training are not copied: {', '.join(others)}"


def _save_weights(
    experiment: TranslationExperiment | LanguageModelExperiment,
    data: TextData | TokenData,
    draft: Path,
    checkpoint: Checkpoint,
) -> str:
    """Writes the weights under the names that ``suite.load`` gives them, the tokenizer, and the sizes."""
    draft.mkdir()
    values = {
        f"layers.{layer}.{name}": value.contiguous()
        for layer in range(experiment.list_length)
        for name, value in values_of(checkpoint.read(layer)).items()
    }
    save_file(values, draft / "model.safetensors", metadata={"format": "pt"})
    data.tokenizer.save_pretrained(draft)
    sizes = {"experiment": experiment.name, "step": checkpoint.step, **experiment.model_dump(mode="json")["model"]}
    (draft / "config.json").write_text(json.dumps(sizes, indent=1) + "\n")
    return ""


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
