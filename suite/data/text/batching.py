"""Mini-batches of translation pairs: selection, micro-batches, tensors.

    text.sorted_steps=3    draws of steps 6, 7, 8    sorted by length    cut into 3    in random order
                           a long  b short | c ...   b . . . . . . a     [.][.][.]     steps 6, 7, 8

A mini-batch depends on (seed, step) and on R x M, not on how replicas share the R x M micro-batches. So a run can
resume with another R and sees the same micro-batches as long as R x M stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from torch import Tensor

from suite.data.text.cutting import cut_evenly, pad_to_rectangle, padded
from suite.data.text.sampling import Draw, PairSampler, temperature_weights
from suite.data.text.splitting import TRAIN, VALID
from suite.data.text.subset import chosen_pairs
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN_ID, END_ID, PAD_ID
from suite.errors import DataError, SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import MiniBatch, sizes
from suite.settings import TextSettings, TrainSettings

_HELD_OUT_SEED, _HELD_OUT_TEMPERATURE = 0, 5.0
"""Seed and temperature of the validation sample: fixed, so that runs with other ones are scored on the same pairs."""
_FETCH = 64  # pairs read at once


@dataclass(frozen=True, slots=True)
class Example:
    """One direction of a pair with special tokens: source ``<2xx> ... </s>``, labels ``... </s>``."""

    source: list[int]
    labels: list[int]

    def order(self, multiple: int) -> tuple[int, int, int, int]:
        """Returns the sort key: the wider side first. This needs less padding than sorting by the sum or by one side.
        Widths are padded to multiples."""
        source, target = len(self.source), len(self.labels)
        widest, both = padded(max(source, target), multiple), padded(source, multiple) + padded(target, multiple)
        return widest, both, source, target


class TranslationBatches:
    """The training mini-batches of a run, by step and replica, and its held-out mini-batches."""

    def __init__(
        self, data: TextData, text: TextSettings, train: TrainSettings, replicas: int, micro_batches: int
    ) -> None:
        self._data = data
        self._text = text
        self._batch_tokens, self._seed = train.batch_tokens, train.seed
        self._replicas = replicas
        self._micro_batches = micro_batches
        self._sampler = PairSampler(
            data.sizes[TRAIN],
            text.temperature,
            train.seed,
            data.drawn(text.languages),
            chosen_pairs(data, text, train.seed),
        )
        self._pool: tuple[int, list[list[Example]]] | None = None
        """The first of the steps that were sorted together last, and the examples of each."""
        self._language_ids = [data.language_id(language) for language in data.languages]

    def batch(self, step: int, replica: int) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (source (B, S), target_in (B, T)) and targets (labels (B, T)), int64, padded with 0 to
        multiples of ``text.pad_to``. The weight counts the labels of the whole mini-batch, about
        ``train.batch_tokens``.
        Raises SettingError when the mini-batch has fewer pairs than there are replicas.
        """
        examples = self._sorted_examples(step)
        parts = [self._tensors(part) for part in self._cut(examples, self._replicas * self._micro_batches)]
        if len(parts) < self._replicas:
            raise SettingError(
                f"the mini-batch of step {step} has {len(parts)} pairs for {self._replicas} replicas; "
                f"raise train.batch_tokens, now {self._batch_tokens}"
            )
        counts = sizes(len(parts), self._replicas)
        offset = sum(counts[:replica])
        return _mini_batch(parts[offset : offset + counts[replica]], _label_count(examples), offset)

    def held_out(self, pairs: int, micro_batches: int) -> list[MiniBatch]:
        """Returns a fixed sample of ``pairs`` validation pairs in one direction, or of all pairs in both directions if
        these are fewer.

        The pairs are of the languages that the run trains on, in a fixed order for each language: of two runs with
        other languages one has the first of the pairs that the other has. Each micro-batch is of one language, a group
        of the mini-batch. Each mini-batch is for one replica and has about ``train.batch_tokens`` labels, each
        micro-batch at most about a part in ``micro_batches`` of that.
        Raises DataError when there are no validation pairs.
        """
        counts, drawn = self._data.sizes[VALID], self._data.drawn(self._text.languages)
        if not any(counts[language] for language in drawn):
            scope = f" in {', '.join(self._text.languages)}" if self._text.languages else ""
            raise DataError(f"the text has no validation pairs{scope}; use a larger corpus or other languages")
        draws = self._held_out_draws(drawn)[:pairs]
        of_language: dict[int, list[Example]] = {}
        for draw, example in zip(draws, self._examples(VALID, draws), strict=True):
            of_language.setdefault(draw.language, []).append(example)
        most = max(1, self._batch_tokens // micro_batches)
        parts = [
            (self._data.languages[language], part)
            for language in sorted(of_language)
            for part in self._parts(self._sorted(of_language[language]), most)
        ]
        parts.sort(key=lambda part: self._order(part[1][-1]))  # micro-batches of similar length follow each other
        return [self._held_out_batch(group) for group in _grouped(parts, self._batch_tokens)]

    def _held_out_draws(self, drawn: Sequence[int]) -> list[Draw]:
        """Returns all validation pairs of some languages in both directions. Of the first n, the languages have shares
        by their weights, as far as they have pairs."""
        sizes = self._data.sizes[VALID]
        weights = temperature_weights([sizes[language] for language in drawn], _HELD_OUT_TEMPERATURE)
        found = []
        for language, weight in zip(drawn, weights.tolist(), strict=True):
            start, code = sum(sizes[:language]), self._data.languages[language]
            order = np.random.default_rng([_HELD_OUT_SEED, *code.encode()]).permutation(2 * sizes[language])
            found += [
                ((place + 0.5) / weight, Draw(language, start + entry // 2, entry % 2 == 0))
                for place, entry in enumerate(order.tolist())
            ]
        return [draw for _, draw in sorted(found, key=lambda entry: (entry[0], entry[1].language))]

    def _sorted_examples(self, step: int) -> list[Example]:
        """Returns the examples of a step, sorted by length."""
        count = self._text.sorted_steps
        first = step - step % count
        pool = self._pool
        if pool is None or pool[0] != first:
            drawn = [example for each in range(first, first + count) for example in self._training_examples(each)]
            parts = _equal_parts(self._sorted(drawn), count)
            order = np.random.default_rng([self._seed, first]).permutation(count)
            self._pool = pool = first, [parts[at] for at in order]
        return pool[1][step - first]

    def _order(self, example: Example) -> tuple[int, int, int, int]:
        return example.order(self._text.pad_to)

    def _sorted(self, examples: Iterable[Example]) -> list[Example]:
        return sorted(examples, key=self._order)

    def _training_examples(self, step: int) -> Iterator[Example]:
        """Yields the examples of a step until their labels reach ``train.batch_tokens``."""
        draws, labels = self._sampler.draws(step), 0
        while True:
            for example in self._examples(TRAIN, list(islice(draws, _FETCH))):
                yield example
                labels += len(example.labels)
                if labels >= self._batch_tokens:
                    return

    def _examples(self, split: str, draws: Sequence[Draw]) -> Iterator[Example]:
        rows = self._data.token_ids(split, [draw.row for draw in draws])
        for draw, (english, translation) in zip(draws, rows, strict=True):
            if draw.from_english:
                source, target, language_id = english, translation, self._language_ids[draw.language]
            else:
                source, target, language_id = translation, english, self._data.english_id
            yield Example([language_id, *source, END_ID], [*target, END_ID])

    def _parts(self, examples: Sequence[Example], labels: int) -> list[list[Example]]:
        """Splits sorted examples into parts of about ``labels`` labels or fewer."""
        return self._cut(examples, -(-_label_count(examples) // labels))

    def _cut(self, examples: Sequence[Example], count: int) -> list[list[Example]]:
        """Splits sorted examples into ``count`` parts of even cost, shortest rows first."""
        widths = [(len(example.source), len(example.labels)) for example in examples]
        return [[examples[i] for i in part] for part in cut_evenly(widths, count, self._text.pad_to)]

    def _held_out_batch(self, parts: Sequence[tuple[str, list[Example]]]) -> MiniBatch:
        """Returns a mini-batch of micro-batches of one language each."""
        groups = [(language, float(_label_count(examples))) for language, examples in parts]
        tensors = [self._tensors(examples) for _, examples in parts]
        weight = sum(weight for _, weight in groups)
        inputs, targets = ([part[at] for part in tensors] for at in (0, 1))
        return MiniBatch(inputs, targets, weight, groups=groups)

    def _tensors(self, examples: Sequence[Example]) -> tuple[Tensors, Tensors]:
        labels = self._rectangle([example.labels for example in examples])
        target_in = self._rectangle([[BEGIN_ID, *example.labels[:-1]] for example in examples])
        return (self._rectangle([example.source for example in examples]), target_in), (labels,)

    def _rectangle(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Returns the rows as one int64 tensor (rows, padded width), filled with the padding id."""
        return pad_to_rectangle(rows, PAD_ID, padded(max(map(len, rows)), self._text.pad_to))


def _equal_parts(examples: Sequence[Example], count: int) -> list[list[Example]]:
    """Splits examples into ``count`` consecutive, non-empty parts with about as many labels each."""
    done = np.cumsum([len(example.labels) for example in examples])
    ends = [0]
    for part in range(1, count):
        end = int(np.searchsorted(done, done[-1] * part / count)) + 1
        ends.append(min(max(end, ends[-1] + 1), len(examples) - (count - part)))
    return [list(examples[start:end]) for start, end in pairwise([*ends, len(examples)])]


def _label_count(examples: Iterable[Example]) -> int:
    return sum(len(example.labels) for example in examples)


def _grouped(parts: Sequence[tuple[str, list[Example]]], tokens: int) -> Iterator[list[tuple[str, list[Example]]]]:
    group: list[tuple[str, list[Example]]] = []
    labels = 0
    for part in parts:
        own = _label_count(part[1])
        labels += own
        if group and labels > tokens:
            yield group
            group, labels = [], own
        group.append(part)
    if group:
        yield group


def _mini_batch(parts: Sequence[tuple[Tensors, Tensors]], labels: int, offset: int) -> MiniBatch:
    return MiniBatch([inputs for inputs, _ in parts], [targets for _, targets in parts], float(labels), offset)
