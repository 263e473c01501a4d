"""``make table NAME=decoding RUN=...``: compares our decoding speed with ``generate`` of the exported model.

Both translate the same test pairs in alternating rounds, in the same groups of sentences; greedy tokens are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console

from experiments.report.table import Table, Value
from launch.inference.decode import find_text_run, translate_tokens
from launch.inference.export import export
from launch.inference.model_text import load_text, trained_languages
from launch.inference.score import directions, scored_rows
from launch.runs.store import RunFolder, find_run
from launch.worker.cgroups import cpu_limit
from suite.data.text.packing import pad_to_rectangle
from suite.data.text.tokenizer import END_ID, PAD_ID
from suite.decoding.beam import LENGTH_PENALTY, SIZE
from suite.decoding.grouping import group_by_length

LANGUAGES, PAIRS, ROUNDS = 10, 60, 3
"""Languages, test pairs of each direction, and alternating rounds."""

Tokens = list[list[int]]


def decoding_table(asked: str, console: Console) -> Table:
    """Exports a run and returns its table. Raises the errors of ``export``."""
    run = find_run(asked)
    experiment = find_text_run(run)
    folder = export(asked, "huggingface", console)
    data = load_text(run, experiment, console, with_test=True)
    chosen = sorted(trained_languages(experiment, data), key=lambda code: -data.pairs[code])[:LANGUAGES]
    sources = [
        source
        for code in chosen
        for one in directions(code, data, scored_rows(code, data, PAIRS))
        for source in one.sources
    ]
    threads = experiment.train.threads or cpu_limit()
    theirs = _Generate(str(folder), threads)
    rows: list[list[Value]] = []
    for beam in (1, SIZE):
        ours: list[float] = []
        others: list[float] = []
        for _ in range(ROUNDS):
            written = translate_tokens(run, sources, 1, console, beam)
            ours.append(len(sources) / written.seconds)
            found, seconds = theirs(sources, beam)
            others.append(len(sources) / seconds)
        same = sum(one == other for one, other in zip(written.results, found, strict=True))
        rows.append([
            "greedy" if beam == 1 else f"beam {beam}", statistics.median(ours), _spread(ours),
            statistics.median(others), _spread(others), statistics.median(ours) / statistics.median(others), same,
        ])  # fmt: skip
    return _table(run, rows, len(sources), len(chosen), threads, written.step)


class _Generate:
    """The exported model in this process."""

    def __init__(self, folder: str, threads: int) -> None:
        from transformers import AutoModelForSeq2SeqLM

        self._threads = threads
        self._model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()

    def __call__(self, sources: Sequence[Sequence[int]], beam: int) -> tuple[Tokens, float]:
        """Returns the tokens of each source, without special tokens, and the seconds."""
        torch.set_num_threads(self._threads)
        found: Tokens = [[] for _ in sources]
        begin = time.monotonic()
        for group in group_by_length(sources, beam):
            ids = pad_to_rectangle([sources[at] for at in group], PAD_ID)
            with torch.inference_mode():
                written = self._model.generate(
                    input_ids=ids, attention_mask=(ids != PAD_ID).long(), num_beams=beam, do_sample=False,
                    length_penalty=LENGTH_PENALTY,
                )  # fmt: skip
            for at, row in zip(group, written[:, 1:].tolist(), strict=True):
                found[at] = row[: row.index(END_ID)] if END_ID in row else row
        return found, time.monotonic() - begin


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):,.0f}-{max(values):,.0f}"


def _table(run: RunFolder, rows: list[list[Value]], count: int, languages: int, threads: int, step: int) -> Table:
    headings = (
        "search", "sentences/s, ours", "spread", "sentences/s, generate", "spread", "ratio", f"equal, of {count}",
    )  # fmt: skip
    notes = [
        f"Measured: {run.path.parent.name}/{run.path.name} at step {step}, {count} test sentences of {languages} "
        f"languages in both directions, K = 1, {threads} threads, median of {ROUNDS} alternating rounds. Beams may "
        "differ: generate normalises length and keeps finished hypotheses differently.",
    ]
    return Table("decoding", "Decoding compared with transformers' generate", headings, rows, notes)
