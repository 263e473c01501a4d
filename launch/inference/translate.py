"""``make translate RUN=... TO=de TEXT="..."``: translates lines of text with a trained run's model."""

from __future__ import annotations

import sys

from rich.console import Console

from experiments.base.hints import option
from launch.inference.decode import decode, find_text_run, stages_of
from launch.inference.decoding_methods import BeamSearch
from launch.inference.model_text import encoded_lines, language_of, load_data, source_of, trained_languages
from launch.runs.checkpoints import described_checkpoint, kind_of_checkpoint
from launch.runs.store import find_run
from launch.terminal import Terminal
from suite.data.text.text import TextData
from suite.data.text.tokenizer import ENGLISH
from suite.decoding.beam import SIZE
from suite.errors import SettingError
from suite.evaluation.scores import one_line
from suite.training.checkpoint import Choice


def translate(requested: str, target_language: str, text: str, console: Console, choice: Choice = None) -> None:
    """Prints the translation of each line of ``text``, or else of standard input, in order and as soon as it is done;
    empty lines stay empty. The workers start once. Standard error says which checkpoint is used, and which lines are
    too long; these give empty lines.

    Raises SettingError for an invalid text or language and for standard input that is not UTF-8, CheckpointError for a
    run without a valid checkpoint.
    """
    run = find_run(requested)
    experiment = find_text_run(run)
    messages = Terminal(stderr=True)  # standard output has only the results
    data = load_data(run, experiment, TextData, messages, choice)
    language = language_of(target_language, [*trained_languages(experiment, data), ENGLISH])
    lines = lines_of(text) if text else read_lines(messages)
    if not any(line.strip() for line in lines):
        raise SettingError(f"the text to translate is empty; give {option('TEXT')} or lines on standard input")
    max_length = experiment.text.max_length
    found = encoded_lines(
        {number: line for number, line in enumerate(lines) if line.strip()},
        lambda line: source_of(line, language, data, max_length),
        messages,
    )
    numbers, sources = list(found), list(found.values())
    pending_lines = {number: "" for number in range(len(lines)) if number not in found}
    printed = 0

    def print_in_order(at: int, tokens: list[int]) -> None:
        nonlocal printed
        (decoded,) = data.tokenizer.batch_decode([tokens], skip_special_tokens=True)
        pending_lines[numbers[at]] = one_line(decoded)
        while printed in pending_lines:
            console.print(pending_lines[printed])
            del pending_lines[printed]  # only now: a line that could not be printed is retried
            printed += 1

    stages = stages_of(experiment, None)
    decoded = decode(run, sources, BeamSearch(SIZE, max_length), stages, messages, print_in_order, choice)
    if printed < len(lines):
        raise RuntimeError(f"only {printed} of {len(lines)} lines were printed")
    messages.print(described_checkpoint(decoded.step, kind_of_checkpoint(run, experiment, decoded.step)))


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text. Only line feeds end them: other separators of Unicode may be within a sentence."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def read_lines(console: Console) -> list[str]:
    """Returns the lines of standard input; none if it is closed. Raises SettingError if it is not UTF-8."""
    if sys.stdin is None:
        return []
    if sys.stdin.isatty():
        console.print("type the lines; end with Ctrl-D")
    data = sys.stdin.buffer.read()
    try:
        return lines_of(data.decode().removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingError(
            f"standard input is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}, in line "
            f"{line}; convert it first, for example with iconv"
        ) from None
