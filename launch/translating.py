"""``make translate RUN=... TO=de TEXT="..."``: one text by a trained run's model."""

from __future__ import annotations

from rich.console import Console

from launch.decoding import decode, stages_of, text_run
from launch.model_text import language_of, source_of, text_of, trained_languages
from launch.runs import find_run
from suite.data.tokenizer import ENGLISH
from suite.evaluation.scores import one_line


def translate(asked: str, to: str, text: str, console: Console) -> None:
    """Prints the translation. Raises SettingError for a text or language that the model cannot take, CheckpointError
    for a run without a finished checkpoint."""
    run = find_run(asked)
    experiment = text_run(run)
    data = text_of(run, experiment, console)
    language = language_of(to, [*trained_languages(experiment, data), ENGLISH])
    source = source_of(text, language, data, experiment.text.max_tokens)
    written = decode(run, [source], stages_of(experiment, None), console)
    (translation,) = data.tokenizer.batch_decode(written.tokens, skip_special_tokens=True)
    console.print(one_line(translation))
