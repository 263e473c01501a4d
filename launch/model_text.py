"""The text that goes with a trained run: its vocabulary, its languages, and sources as its model reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from experiments.tasks import data_folder, prepare_data
from experiments.text_experiment import TranslationExperiment
from launch.checkpoints import place_of
from launch.runs import CACHE, RunFolder
from suite.data.languages import canonical
from suite.data.text import TextData
from suite.data.tokenizer import END_ID
from suite.errors import CheckpointError, DataError, SettingError, nearest
from suite.training.checkpoint import list_checkpoints


def text_of(run: RunFolder, experiment: TranslationExperiment, console: Console) -> TextData:
    """Returns the prepared text that a run was trained on, prepared anew where the cache lost it.

    Raises CheckpointError when the run has no checkpoint yet, DataError when the text is another one.
    """
    found = list_checkpoints(place_of(run, experiment), console.print)
    if not found:
        raise CheckpointError(
            f"run {run.path} has no finished checkpoint; train it to its first one with make resume RUN={run.path}"
        )
    prepared = prepare_data(experiment, CACHE, console.print)
    data = TextData.open(data_folder(experiment, CACHE).resolve()) if prepared == experiment.data else None
    if data is None or data.digest != found[0].notes.get("vocabulary", data.digest):
        raise DataError(
            f"run {run.path} was trained on {experiment.data} with another vocabulary than can be prepared now, so "
            "its ids would mean other words; bring back the cache that the run was made with"
        )
    return data


def trained_languages(experiment: TranslationExperiment, data: TextData) -> list[str]:
    """Returns the languages beside English that a run was trained on."""
    drawn = experiment.text.languages
    return [code for code in data.languages if drawn is None or code in drawn]


def language_of(asked: str, known: Sequence[str]) -> str:
    """Returns the suite's code of a language. Raises SettingError with the nearest to one that is not known."""
    for code in (asked, canonical(asked)):
        if code is not None and code in known:
            return code
    raise SettingError(f"the model knows no language {asked!r}; {nearest(asked, known)}")


def source_of(text: str, to: str, data: TextData, most: int) -> list[int]:
    """Returns a text as the model reads it: ``<2xx> ... </s>``.

    Raises SettingError for an empty text, and for one of more than ``most`` tokens, marks included.
    """
    if not text.strip():
        raise SettingError('the text to translate is empty; give one with TEXT="..."')
    ids = [data.language_id(to), *data.tokenizer.encode(text, add_special_tokens=False), END_ID]
    if len(ids) > most:
        raise SettingError(
            f"the text has {len(ids)} tokens, two marks included, and the model was trained on {most} at most "
            "(text.max_tokens); split it into sentences"
        )
    return ids
