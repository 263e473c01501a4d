"""``make translate RUN=... TO=de TEXT="..."``: texts, one a line, by a trained run's model."""

from __future__ import annotations

import sys

from rich.console import Console

from launch.decoding import decode, stages_of, text_run
from launch.model_text import language_of, source_of, text_of, trained_languages
from launch.runs import find_run
from suite.data.tokenizer import ENGLISH
from suite.errors import SettingError
from suite.evaluation.scores import one_line


def translate(asked: str, to: str, text: str, console: Console) -> None:
    """Prints the translation of each line of ``text``, or of standard input without one, in their order and as
    soon as it is there; an empty line stays one. The workers start once.

    Raises SettingError for a text or language that the model cannot take and for standard input that is not UTF-8,
    CheckpointError for a run without a finished checkpoint.
    """
    run = find_run(asked)
    experiment = text_run(run)
    data = text_of(run, experiment, console)
    language = language_of(to, [*trained_languages(experiment, data), ENGLISH])
    lines = text.splitlines() if text else _typed(console)
    if not any(line.strip() for line in lines):
        raise SettingError('the text to translate is empty; give TEXT="..." or lines on standard input')
    numbers = [number for number, line in enumerate(lines) if line.strip()]
    sources = [source_of(lines[number], language, data, experiment.text.max_tokens) for number in numbers]
    written = {number: "" for number, line in enumerate(lines) if not line.strip()}
    printed = 0

    def heard(at: int, tokens: list[int]) -> None:
        nonlocal printed
        (decoded,) = data.tokenizer.batch_decode([tokens], skip_special_tokens=True)
        written[numbers[at]] = one_line(decoded)
        while printed in written:
            console.print(written[printed])
            del written[printed]  # only now: what could not be printed is tried again
            printed += 1

    decode(run, sources, stages_of(experiment, None), console, heard=heard)
    if printed < len(lines):
        raise RuntimeError(f"only {printed} of {len(lines)} lines were printed")


def _typed(console: Console) -> list[str]:
    """Returns the lines of standard input; none where it is closed. Raises SettingError where it is not UTF-8."""
    if sys.stdin is None:
        return []
    if sys.stdin.isatty():
        console.print("type the lines to translate; end with Ctrl-D")
    data = sys.stdin.buffer.read()
    try:
        return data.decode().splitlines()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(
            f"standard input is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}, in line "
            f"{line}; convert it first, with iconv for instance"
        ) from None
