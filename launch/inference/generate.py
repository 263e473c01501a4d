"""``make generate RUN=... TEXT="..."``: continues texts with a trained language model."""

from __future__ import annotations

from rich.console import Console

from experiments.base.hints import option
from experiments.language_model.experiment import LanguageModelExperiment
from experiments.registry import read_experiment_file
from launch.inference.decode import decode, stages_of
from launch.inference.decoding_methods import Request, Sampling
from launch.inference.model_text import encoded_lines, load_data
from launch.inference.translate import read_lines
from launch.runs.checkpoints import described_checkpoint, kind_of_checkpoint
from launch.runs.store import RunFolder, find_run
from launch.terminal import Terminal
from suite.data.documents.tokenizer import END_ID
from suite.data.documents.tokens import TokenData
from suite.data.tokens import encode_all
from suite.errors import SettingError
from suite.training.checkpoint import Choice


def generate(requested: str, text: str, request: Request, console: Console, choice: Choice = None) -> None:
    """Prints each prompt with its continuation: ``text``, or each line of standard input that is not empty. Standard
    error names the lines that are too long.

    Raises SettingError for another kind of run, no prompt, only too long ones and an impossible request,
    CheckpointError for a run without a valid checkpoint or the chosen one.
    """
    request.check()
    run = find_run(requested)
    experiment = find_language_model_run(run)
    messages = Terminal(stderr=True)  # standard output has only the results
    data = load_data(run, experiment, TokenData, messages, choice)
    lines = [text] if text.strip() else read_lines(messages)
    given = {number: line for number, line in enumerate(lines) if line.strip()}
    if not given:
        raise SettingError(f"the prompt is empty; give {option('TEXT')} or lines on standard input")
    rooms = encoded_lines(given, lambda prompt: _room(_source(data, prompt), experiment, request.tokens), messages)
    prompts, stages = [given[number] for number in rooms], stages_of(experiment, None)
    texts, step = continuations(run, experiment, data, prompts, request, stages, messages, choice)
    for line in texts:
        console.print(line)
    messages.print(described_checkpoint(step, kind_of_checkpoint(run, experiment, step)))


def continuations(
    run: RunFolder,
    experiment: LanguageModelExperiment,
    data: TokenData,
    prompts: list[str],
    request: Request,
    stages: int,
    console: Console,
    choice: Choice = None,
) -> tuple[list[str], int]:
    """Returns each prompt with its continuation, and the checkpoint's step. Raises SettingError for a prompt that
    leaves no room in a row."""
    sources = [_source(data, prompt) for prompt in prompts]
    method = Sampling([_room(source, experiment, request.tokens) for source in sources], END_ID, request)
    decoded = decode(run, sources, method, stages, console, lambda at, tokens: None, choice)
    texts = [source[1:] + tokens for source, tokens in zip(sources, decoded.results, strict=True)]
    return [str(data.tokenizer.decode(tokens)) for tokens in texts], decoded.step


def find_language_model_run(run: RunFolder) -> LanguageModelExperiment:
    """Returns the experiment of a run that can continue text. Raises SettingError for any other."""
    experiment = read_experiment_file(run.experiment)
    if not isinstance(experiment, LanguageModelExperiment):
        raise SettingError(f"run {run.path} is no language model ({experiment.data}); choose a run of transformer_<L>")
    return experiment


def _source(data: TokenData, prompt: str) -> list[int]:
    return [END_ID, *encode_all(data.tokenizer, [prompt])[0]]


def _room(source: list[int], experiment: LanguageModelExperiment, tokens: int | None) -> int:
    """Returns the most tokens of a continuation: the model has seen no position past a row's."""
    most = experiment.text.length - len(source) + 1  # the last token is not read
    wanted = most if tokens is None else tokens
    if not 1 <= wanted <= most:
        raise SettingError(
            f"the prompt has {len(source) - 1} tokens, and the model was trained on rows of {experiment.text.length} "
            f"(text.length), so {max(0, most)} can follow it; "
            + ("shorten the prompt" if most < 1 else f"set --tokens={most} or less")
        )
    return wanted
