"""``make score RUN=...``: NLL, BLEU and chrF of a trained run's model on the test pairs, by language.

    scores.json                     the scores, their signatures, the speed
    scores/en-de.src, .hyp, .ref    sources, translations and references, one sentence a line

sacreBLEU's command line gives these files the same scores.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.report.table import Table, Value
from experiments.translation.experiment import TranslationExperiment
from experiments.translation.score_settings import ScoreSettings, read
from launch.inference.decode import decode, find_text_run, stages_of
from launch.inference.decoding_methods import BeamSearch, ForcedScoring
from launch.inference.model_text import language_of, load_data, rows_of, trained_languages
from launch.runs.checkpoints import described_checkpoint, kind_of_checkpoint
from launch.runs.store import RunFolder, find_run, run_lock
from launch.tracking.wandb_finish import publish
from launch.watching.report import update_page
from launch.watching.translation_samples import mean_rows
from suite.data.text.cleaning import PLACEHOLDER
from suite.data.text.splitting import TEST
from suite.data.text.subset import train_counts
from suite.data.text.text import TextData
from suite.data.text.tokenizer import END_ID, ENGLISH
from suite.decoding.beam import LENGTH_PENALTY
from suite.errors import DataError
from suite.evaluation.scores import (
    FEWEST_PAIRS,
    MEASURES,
    THIRDS,
    TranslatedPair,
    macro_average,
    one_line,
    score_pairs,
    signatures,
    thirds,
)
from suite.paths import write_atomically
from suite.training.checkpoint import Choice


@dataclass(frozen=True)
class Direction:
    """The test pairs of a language in one direction."""

    language: str
    source: str
    target: str
    sources: list[list[int]]
    """Token ids."""
    targets: list[list[int]]
    """The same of the references, without special tokens."""
    lines: list[str]
    references: list[str]

    @property
    def name(self) -> str:
        """As in the file names."""
        return f"{self.source}-{self.target}"

    def record(self, translations: Sequence[str], nll: Sequence[float]) -> dict[str, Any]:
        """Returns the scores of all pairs, and as ``plain`` of those without a placeholder in their English."""
        tokens = [len(target) + 1 for target in self.targets]
        texts = zip(self.lines, translations, self.references, nll, tokens, strict=True)
        pairs = [TranslatedPair(*each) for each in texts]
        english = self.lines if self.source == ENGLISH else self.references
        plain = [pair for pair, text in zip(pairs, english, strict=True) if not PLACEHOLDER.search(text)]
        return {**score_pairs(pairs), "plain": score_pairs(plain)}


def score_from_cli(requested: str, settings: str, console: Console, choice: Choice = None) -> None:
    """Scores a run from the command line. Raises SettingError for an unknown run or setting, and as ``score_run``."""
    run = find_run(requested)
    score_run(run, read(settings), console, choice)
    update_page(run, console)


def score_run(run: RunFolder, settings: ScoreSettings, console: Console, choice: Choice = None) -> dict[str, Any]:
    """Translates a run's test pairs in both directions, writes the texts and ``scores.json``, and returns the latter.

    Without ``settings.languages`` it scores all languages that the run was trained on and that have ``FEWEST_PAIRS``
    test pairs. Thirds, by training pairs, are of all languages of the text with so many, whichever are requested.
    Raises SettingError for an unknown language or while another process trains or scores the run, DataError for a
    language with fewer pairs, CheckpointError if the run has no valid checkpoint.
    """
    with run_lock(run.path):
        return _score(run, settings, console, choice)


def _score(run: RunFolder, settings: ScoreSettings, console: Console, choice: Choice) -> dict[str, Any]:
    experiment = find_text_run(run)
    data = load_data(run, experiment, partial(TextData, with_test=True), console, choice)
    sizes = dict(zip(data.languages, data.sizes[TEST], strict=True))
    trained = {code: sizes[code] for code in trained_languages(experiment, data)}
    chosen = _choose_languages(trained, settings.languages, data)
    rows = {language: scored_rows(language, data, settings.max_pairs) for language in chosen}
    chosen_directions = [direction for language in chosen for direction in directions(language, data, rows[language])]
    sources = [source for direction in chosen_directions for source in direction.sources]
    stages = stages_of(experiment, settings.stages)
    console.print(
        f"translating {len(sources):,} sentences in {len(chosen_directions)} directions, beam {settings.beam}, "
        f"K = {stages}"
    )
    search = BeamSearch(settings.beam, experiment.text.max_length)
    written = decode(run, sources, search, stages, console, choice=choice)
    references = ForcedScoring([[*target, END_ID] for direction in chosen_directions for target in direction.targets])
    losses = decode(run, sources, references, stages, console, lambda at, losses: None, choice).results
    nll = [sum(of_tokens) for of_tokens in losses]
    texts = [one_line(text) for text in data.tokenizer.batch_decode(written.results, skip_special_tokens=True)]
    run.scores.unlink(missing_ok=True)  # an interruption must not leave it beside other texts
    shutil.rmtree(run.path / "scores", ignore_errors=True)
    (run.path / "scores").mkdir()
    records: dict[str, dict[str, Any]] = {}
    start = 0
    for direction in chosen_directions:
        part = slice(start, start + len(direction.sources))
        start = part.stop
        _write(run.path / "scores", direction, texts[part])
        records[direction.name] = direction.record(texts[part], nll[part])
    record = {
        "step": written.step,
        "checkpoint": kind_of_checkpoint(run, experiment, written.step),
        "split": TEST,
        "beam": settings.beam,
        "length_penalty": LENGTH_PENALTY,
        "max_pairs": settings.max_pairs,
        "max_length": experiment.text.max_length,
        "seconds": written.seconds,
        "sentences_per_second": len(sources) / written.seconds,
        "signatures": signatures(),
        **_means(records, chosen_directions, data, experiment),
    }
    write_atomically(run.path / "scores.json", json.dumps(record, indent=1) + "\n")
    _print_scores(run, record, console)
    publish(run, "scores", console.print)
    return record


def _means(
    records: dict[str, dict[str, Any]], chosen: Sequence[Direction], data: TextData, experiment: TranslationExperiment
) -> dict[str, Any]:
    """Returns the record's directions, the thirds of their languages, and the means over each third."""
    sizes, counts = dict(zip(data.languages, data.sizes[TEST], strict=True)), train_counts(data, experiment.text)
    third_of = thirds({language: counts[language] for language, pairs in sizes.items() if pairs >= FEWEST_PAIRS})
    third_by_direction = {direction.name: third_of[direction.language] for direction in chosen}
    return {
        "directions": {
            direction.name: {"train_pairs": counts[direction.language], **records[direction.name]}
            for direction in chosen
        },
        "thirds": {direction.language: third_of[direction.language] for direction in chosen},
        "macro": macro_average(records, third_by_direction),
        "macro_copy": macro_average({name: entry["copy"] for name, entry in records.items()}, third_by_direction),
    }


def _choose_languages(sizes: dict[str, int], requested: Sequence[str] | None, data: TextData) -> list[str]:
    """Returns the languages to score; ``sizes`` has the test pairs of the run's languages."""
    scorable = [language for language, pairs in sizes.items() if pairs >= FEWEST_PAIRS]
    if requested is None:
        if not scorable:
            raise DataError(
                f"no language that the run was trained on has {FEWEST_PAIRS} test pairs; use a larger corpus"
            )
        return scorable
    codes = list(dict.fromkeys(language_of(code, list(sizes)) for code in requested))
    too_small = [f"{code} has {sizes[code]}" for code in codes if code not in scorable]
    if too_small:
        raise DataError(
            f"scoring needs {FEWEST_PAIRS} test pairs a language, and in {data.corpus} {', '.join(too_small)}; "
            f"languages with enough: {', '.join(scorable) or 'none'}"
        )
    return codes


def directions(language: str, data: TextData, rows: Sequence[int]) -> Iterator[Direction]:
    """Yields both directions of a language's test pairs in these rows."""
    ids, texts = data.token_ids(TEST, rows), data.texts(TEST, rows)
    english, other = [one_line(pair[0]) for pair in texts], [one_line(pair[1]) for pair in texts]
    target_id, english_id = data.language_id(language), data.english_id
    own, others = [pair[0] for pair in ids], [pair[1] for pair in ids]
    from_english = [[target_id, *ids, END_ID] for ids in own]
    to_english = [[english_id, *ids, END_ID] for ids in others]
    yield Direction(language, ENGLISH, language, from_english, others, english, other)
    yield Direction(language, language, ENGLISH, to_english, own, other, english)


def scored_rows(language: str, data: TextData, max_pairs: int | None) -> list[int]:
    """Returns the rows of a language's test pairs to score, at most ``max_pairs``, evenly spaced."""
    rows = rows_of(language, TEST, data)
    pairs_taken = len(rows) if max_pairs is None else min(max_pairs, len(rows))
    return [rows[place * len(rows) // pairs_taken] for place in range(pairs_taken)]


def _write(folder: Path, direction: Direction, hypotheses: Sequence[str]) -> None:
    for kind, lines in (("src", direction.lines), ("hyp", hypotheses), ("ref", direction.references)):
        (folder / f"{direction.name}.{kind}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _print_scores(run: RunFolder, record: dict[str, Any], console: Console) -> None:
    third_of = record["thirds"]
    counts = {"all": len(third_of)} | {third: list(third_of.values()).count(third) for third in THIRDS}
    rows: list[list[Value]] = [["languages", *counts.values()], *mean_rows(record)]
    notes = ["high, middle and low: thirds of the languages by training pairs", *record["signatures"].values()]
    used = described_checkpoint(record["step"], record["checkpoint"])
    languages = f"{len(third_of)} languages and both directions, each direction with equal weight"
    means = Table("scores", f"means over {languages}, {used}", ("", *counts), rows, notes)
    by_direction: list[list[Value]] = [
        [name, scores["train_pairs"], scores["pairs"], *(scores[measure] for measure in MEASURES)]
        for name, scores in record["directions"].items()
    ]
    headings = ("direction", "training pairs", "test pairs", *MEASURES.values())
    for table in (Table("directions", f"each direction, {used}", headings, by_direction, ()), means):
        console.print(table.rich_table() if console.is_terminal else table.markdown())
    console.print(f"{record['sentences_per_second']:,.0f} sentences a second; scores: {run.path / 'scores.json'}")
