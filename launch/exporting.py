"""``make export RUN=... FORMAT=huggingface``: a trained run's model as a folder that ``transformers`` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.console import Console
from torch import Tensor

from experiments.huggingface.card import card
from experiments.huggingface.convert import exported_model, exported_tokenizer
from experiments.text_experiment import TranslationExperiment
from launch.checkpoints import place_of
from launch.decoding import text_run
from launch.model_text import text_of
from launch.runs import RunFolder, find_run, held
from suite.errors import CheckpointError, SettingError, nearest
from suite.training.checkpoint import list_checkpoints

FORMATS = ("huggingface",)


def export(asked: str, form: str, console: Console) -> Path:
    """Writes ``<run>/huggingface/`` and returns it.

    Raises SettingError for another format or while another process exports the run, CheckpointError for a run without a
    finished checkpoint. A run in training can be exported.
    """
    if form not in FORMATS:
        raise SettingError(f"no format is called {form!r}; {nearest(form, FORMATS)}")
    run = find_run(asked)
    with held(run.path, f"{form}.lock"):
        return _export(run, form, console)


def _export(run: RunFolder, form: str, console: Console) -> Path:
    experiment = text_run(run)
    data = text_of(run, experiment, console)
    step, layers = _newest(run, experiment, console)
    model, folder = exported_model(experiment, layers), run.path / form
    shutil.rmtree(folder, ignore_errors=True)
    model.config.register_for_auto_class()  # type: ignore[no-untyped-call]
    model.register_for_auto_class("AutoModelForSeq2SeqLM")  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    exported_tokenizer(data).save_pretrained(folder)
    scores = run.path / "scores.json"
    found = json.loads(scores.read_text()) if scores.exists() else None
    (folder / "README.md").write_text(card(experiment, data, step, model.num_parameters(), found))
    console.print(f"step {step}, {model.num_parameters():,} parameters: {folder}")
    return folder


def _newest(
    run: RunFolder, experiment: TranslationExperiment, console: Console
) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """Returns the step of the newest whole checkpoint, and the values of its layers by name."""
    fault = "it has none"
    for found in list_checkpoints(place_of(run, experiment), console.print):
        found.check_layers(experiment.list_length)
        try:
            read = {layer: found.read(layer) for layer in range(experiment.list_length)}
        except CheckpointError as error:
            fault = str(error)
            console.print(f"checkpoint {found} is not used: {error}")
            continue
        return found.step, {
            layer: {name.removeprefix("value/"): one for name, one in tensors.items() if name.startswith("value/")}
            for layer, tensors in read.items()
        }
    raise CheckpointError(f"no checkpoint of run {run.path} is whole: {fault}; make resume RUN={run.path} writes one")
