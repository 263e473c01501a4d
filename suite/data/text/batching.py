"""Mini-batches of translation pairs: selection, rows, micro-batches, tensors.

    pairs of a step  a b c d e f g    packed into rows  [a d] [b g] [c] [e f]    M = 2 micro-batches of 2 rows each

A mini-batch depends on (seed, step) and on R x M, not on how replicas share the R x M micro-batches. So a run can
resume with another R and sees the same micro-batches as long as R x M stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from suite.data.text.packing import pack, pad_to_rectangle, padded
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

ROW_WIDTH = 64
"""About the fewest tokens on each side of a row. Wider rows are filled better, but attention also computes the pairs of
places that are of different sentences."""

MULTIPLE = 8
"""Widths of rows are padded to multiples of it, so that there are few shapes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One direction of a pair, or of several, with special tokens: source ``<2xx> ... </s>``, labels ``... </s>``."""

    source: list[int]
    labels: list[int]

    @staticmethod
    def of(pairs: Sequence[Row]) -> Row:
        """Returns a row of several pairs."""
        return Row([one for pair in pairs for one in pair.source], [one for pair in pairs for one in pair.labels])

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of source and target."""
        return len(self.source), len(self.labels)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The sort key: the wider side first. This needs less padding than sorting by the sum or by one side."""
        source, target = (padded(length, MULTIPLE) for length in self.lengths)
        return max(source, target), source + target, *self.lengths


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
        self._language_ids = [data.language_id(language) for language in data.languages]

    def batch(self, step: int, replica: int) -> MiniBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (source (B, S), target_in (B, T)) and targets (labels (B, T)), int64, padded with 0 to
        multiples of ``MULTIPLE``. A row has one or several pairs. The weight counts the labels of the whole mini-batch,
        about ``train.batch_tokens``.
        Raises SettingError when the mini-batch has fewer pairs than there are replicas.
        """
        pairs = list(self._training_pairs(step))
        parts = [_tensors(part) for part in self._cut(pairs, self._replicas * self._micro_batches, self._batch_tokens)]
        if len(parts) < self._replicas:
            raise SettingError(
                f"the mini-batch of step {step} has {len(parts)} pairs for {self._replicas} replicas; "
                f"raise train.batch_tokens, now {self._batch_tokens}"
            )
        counts = sizes(len(parts), self._replicas)
        offset = sum(counts[:replica])
        return _mini_batch(parts[offset : offset + counts[replica]], _label_count(pairs), offset)

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
        of_language: dict[int, list[Row]] = {}
        for draw, pair in zip(draws, self._pairs(VALID, draws), strict=True):
            of_language.setdefault(draw.language, []).append(pair)
        most = max(1, self._batch_tokens // micro_batches)
        parts = []
        for language, pairs_of_it in sorted(of_language.items()):
            labels, code = _label_count(pairs_of_it), self._data.languages[language]
            parts += [(code, part) for part in self._cut(pairs_of_it, -(-labels // most), labels)]
        parts.sort(key=lambda part: part[1][-1].order)  # micro-batches of similar length follow each other
        return [_held_out_batch(group) for group in _grouped(parts, self._batch_tokens)]

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

    def _cut(self, pairs: Sequence[Row], count: int, labels: int) -> list[list[Row]]:
        """Packs pairs with about ``labels`` labels into ``count`` micro-batches of equally many rows, the narrowest
        first; fewer if there are fewer pairs."""
        each = max(1, round(labels / (count * max(ROW_WIDTH, self._text.max_length))))
        packed = pack([pair.lengths for pair in pairs], count * each)
        rows = sorted((Row.of([pairs[at] for at in row]) for row in packed), key=lambda row: row.order)
        left = iter(rows)
        return [list(islice(left, size)) for size in reversed(sizes(len(rows), count))]

    def _training_pairs(self, step: int) -> Iterator[Row]:
        """Yields the pairs of a step until their labels reach ``train.batch_tokens``."""
        draws, labels = self._sampler.draws(step), 0
        while True:
            for pair in self._pairs(TRAIN, list(islice(draws, _FETCH))):
                yield pair
                labels += len(pair.labels)
                if labels >= self._batch_tokens:
                    return

    def _pairs(self, split: str, draws: Sequence[Draw]) -> Iterator[Row]:
        rows = self._data.token_ids(split, [draw.row for draw in draws])
        for draw, (english, translation) in zip(draws, rows, strict=True):
            if draw.from_english:
                source, target, language_id = english, translation, self._language_ids[draw.language]
            else:
                source, target, language_id = translation, english, self._data.english_id
            yield Row([language_id, *source, END_ID], [*target, END_ID])


def _held_out_batch(parts: Sequence[tuple[str, list[Row]]]) -> MiniBatch:
    """Returns a mini-batch of micro-batches of one language each."""
    groups = [(language, float(_label_count(rows))) for language, rows in parts]
    tensors = [_tensors(rows) for _, rows in parts]
    weight = sum(weight for _, weight in groups)
    inputs, targets = ([part[at] for part in tensors] for at in (0, 1))
    return MiniBatch(inputs, targets, weight, groups=groups)


def _tensors(rows: Sequence[Row]) -> tuple[Tensors, Tensors]:
    # each target sentence begins with the begin mark, where the labels before it end
    target_in = [[BEGIN_ID, *(BEGIN_ID if id == END_ID else id for id in row.labels[:-1])] for row in rows]
    labels = _rectangle([row.labels for row in rows])
    return (_rectangle([row.source for row in rows]), _rectangle(target_in)), (labels,)


def _rectangle(rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the rows as one int64 tensor (rows, padded width), filled with the padding id."""
    return pad_to_rectangle(rows, PAD_ID, padded(max(map(len, rows)), MULTIPLE))


def _label_count(rows: Iterable[Row]) -> int:
    return sum(len(row.labels) for row in rows)


def _grouped(parts: Sequence[tuple[str, list[Row]]], tokens: int) -> Iterator[list[tuple[str, list[Row]]]]:
    group: list[tuple[str, list[Row]]] = []
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
