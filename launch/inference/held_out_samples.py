"""Translations of a few held-out strings at the end of a run: ``samples.jsonl`` in its folder, and lines to print."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.translation.experiment import TranslationExperiment
from launch.inference.decode import decode_groups
from launch.inference.decoding_methods import BeamSearch
from launch.inference.model import load_model
from launch.inference.model_text import rows_of, source_of, trained_languages
from launch.runs.store import CACHE, RunFolder
from suite.data.text.splitting import VALID
from suite.data.text.text import TextData
from suite.data.text.tokenizer import ENGLISH
from suite.decoding.beam import SIZE
from suite.decoding.decode import Decoder
from suite.decoding.kv_cache import CachedLayers, first_cached_layer
from suite.device import one_thread
from suite.errors import SuiteError
from suite.evaluation.scores import one_line
from suite.paths import write_atomically
from suite.pipeline.model.layers import count_parameters
from suite.pipeline.model.topology import RankCoord

SAMPLES = 3

DRAWN, FEWEST_WORDS = 50, 3
"""Strings that are drawn for each sample; the first of so many words is taken: a single letter shows little."""

MOST_PARAMETERS = 50_000_000
"""Of a model that decodes a few strings on one core in seconds."""


def translate_held_out(run: RunFolder, experiment: Experiment, console: Console) -> list[dict[str, str]]:
    """Translates held-out strings with the run's checkpoint, writes them to its folder, and returns them.

    Returns none for a task other than translation and without held-out strings. Prints why it returns none for a large
    model, and if the checkpoint or the text cannot be read.
    """
    if not isinstance(experiment, TranslationExperiment):
        return []
    parameters = count_parameters(experiment.build()[0])
    if parameters > MOST_PARAMETERS:
        console.print(
            f"no held-out strings are translated: one core is too slow for {parameters / 1e6:,.0f}M parameters (most: "
            f"{MOST_PARAMETERS / 1e6:,.0f}M); use gpipe translate"
        )
        return []
    try:
        run.samples.unlink(missing_ok=True)  # those of an earlier end
        data = TextData(experiment.data_folder(CACHE).resolve())
        pairs = list(_draw(experiment, data))
        if not pairs:
            return []
        translations = _translate([tokens for tokens, _ in pairs], experiment, run)
        texts = data.tokenizer.batch_decode(translations, skip_special_tokens=True)
        samples = [sample | {"translation": one_line(text)} for (_, sample), text in zip(pairs, texts, strict=True)]
        write_atomically(run.samples, "".join(json.dumps(sample) + "\n" for sample in samples))
    except (SuiteError, OSError) as error:  # the run is finished: no storage that fails now may end it
        console.print(f"no held-out strings are translated: {error}")
        return []
    return samples


def described(samples: Sequence[dict[str, str]]) -> list[str]:
    lines = ["held-out strings of the languages with the most text:"] if samples else []
    for sample in samples:
        lines += [
            f"  {sample['direction']}  {sample['source']}",
            f"    model     {sample['translation'] or '(empty)'}",
            f"    reference {sample['reference']}",
        ]
    return lines


def _draw(experiment: TranslationExperiment, data: TextData) -> Iterator[tuple[list[int], dict[str, str]]]:
    """Yields source tokens and texts of held-out pairs, drawn from the languages with the most training pairs; every
    second one is into English."""
    generator = random.Random(experiment.train.seed)
    languages = [code for code in trained_languages(experiment, data) if rows_of(code, VALID, data)]
    languages.sort(key=lambda code: -data.pairs[code])
    seen = list[tuple[str, ...]]()
    for number, language in zip(range(SAMPLES), cycle(languages), strict=False):
        rows, codes = rows_of(language, VALID, data), (ENGLISH, language)
        source, target = (1, 0) if number % 2 else (0, 1)
        pairs = data.texts(VALID, generator.sample(rows, min(DRAWN, len(rows))))
        pairs = [pair for pair in pairs if pair not in seen] or pairs
        pair = next((pair for pair in pairs if len(pair[source].split()) >= FEWEST_WORDS), pairs[0])
        seen.append(pair)
        tokens = source_of(pair[source], codes[target], data, experiment.text.max_length)
        texts = {"source": one_line(pair[source]), "reference": one_line(pair[target])}
        yield tokens, {"direction": f"{codes[source]}-{codes[target]}", **texts}


def _translate(sources: Sequence[Sequence[int]], experiment: TranslationExperiment, run: RunFolder) -> list[list[int]]:
    """Returns the tokens of each translation, found in this process."""
    layers, cpu = list(load_model(run.path).layers), torch.device("cpu")
    part = CachedLayers(layers, 0, first_cached_layer(layers), cpu, False)
    decoder = Decoder(RankCoord(0, 1, 1), part, 0, None, cpu)
    with one_thread():  # the operations are small: on busy cores threads would wait for each other, for minutes
        return decode_groups(decoder, BeamSearch(SIZE, experiment.text.max_length), sources)
