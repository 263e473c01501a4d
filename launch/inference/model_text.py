"""The text data of a trained run: its vocabulary, its languages, and sources encoded for its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.translation.experiment import TranslationExperiment
from launch.runs.checkpoints import checkpoints_to_use
from launch.runs.store import CACHE, RunFolder
from suite.data.documents.tokens import TokenData
from suite.data.text.languages import canonical
from suite.data.text.text import TextData
from suite.data.text.tokenizer import END_ID
from suite.data.tokens import encode_all
from suite.errors import DataError, SettingError, nearest
from suite.training.checkpoint import Choice

Data = TypeVar("Data", TextData, TokenData)
Encoded = TypeVar("Encoded")


def load_data(
    run: RunFolder, experiment: Experiment, open_data: Callable[[Path], Data], console: Console, choice: Choice = None
) -> Data:
    """Returns the prepared text that a run was trained on; prepares it again if it is not in the cache.

    Raises CheckpointError if the run has no checkpoint yet or not the chosen one, DataError if the text differs.
    """
    checkpoints = checkpoints_to_use(run, experiment, choice, console.print)
    prepared = experiment.prepare_data(CACHE, console.print)
    data = open_data(experiment.data_folder(CACHE).resolve()) if prepared == experiment.data else None
    if data is None or data.digest != checkpoints[0].notes.get("vocabulary", data.digest):
        raise DataError(
            f"run {run.path} was trained on {experiment.data} with a vocabulary that cannot be prepared again, so its "
            "token ids would mean other words; restore the cache that the run used"
        )
    return data


def trained_languages(experiment: TranslationExperiment, data: TextData) -> list[str]:
    """Returns the languages that a run was trained on, without English."""
    chosen = experiment.text.languages
    return [code for code in data.languages if chosen is None or code in chosen]


def rows_of(language: str, split: str, data: TextData) -> range:
    """Returns the rows of a language's pairs in a split."""
    at, sizes = data.languages.index(language), data.sizes[split]
    start = sum(sizes[:at])
    return range(start, start + sizes[at])


def language_of(requested: str, known: Sequence[str]) -> str:
    """Returns the suite's code of a language. Raises SettingError with the closest codes for an unknown one."""
    for code in (requested, canonical(requested)):
        if code is not None and code in known:
            return code
    raise SettingError(f"the model does not know the language {requested!r}; {nearest(requested, known)}")


def encoded_lines(lines: Mapping[int, str], encode: Callable[[str], Encoded], console: Console) -> dict[int, Encoded]:
    """Returns what ``encode`` makes of each numbered line, and prints which lines it refuses and why.

    Raises the first SettingError of ``encode`` if it refuses all lines.
    """
    found: dict[int, Encoded] = {}
    errors: dict[int, SettingError] = {}
    for number, line in lines.items():
        try:
            line.encode()
            found[number] = encode(line)
        except UnicodeEncodeError:
            errors[number] = SettingError("the text has bytes that are not UTF-8; convert it first")
        except SettingError as error:
            errors[number] = error
    if not found:
        raise next(iter(errors.values()))
    for number, reason in errors.items():
        console.print(f"line {number + 1} is skipped: {reason}")
    return found


def source_of(text: str, target_language: str, data: TextData, max_length: int) -> list[int]:
    """Returns a text as token ids: ``<2xx> ... </s>``.

    Raises SettingError for a text of more than ``max_length`` tokens, special tokens included.
    """
    ids = [data.language_id(target_language), *encode_all(data.tokenizer, [text])[0], END_ID]
    if len(ids) > max_length:
        raise SettingError(
            f"the text has {len(ids)} tokens, two special ones included, and the model was trained with at most "
            f"{max_length} (text.max_length); split it into sentences"
        )
    return ids
