"""Mini-batches of translation pairs: selection, rows, micro-batches, tensors.

    pairs of a step  a b c d e f g    packed into rows  [a d] [b g] [c] [e f]    M = 2 micro-batches of 2 rows each

Seed, step and ``train.batch_tokens`` determine the pairs of a mini-batch, and R x M how they are cut into
micro-batches. R alone decides only which replica gets which, so a run can resume with another R and sees the same
micro-batches as long as R x M stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
from torch import Tensor

from suite.data.text.packing import Integers, Rows, fill_rectangle, pack, padded
from suite.data.text.sampling import Draws, PairSampler, temperature_weights
from suite.data.text.splitting import TRAIN, VALID
from suite.data.text.store import MARKS
from suite.data.text.subset import chosen_pairs
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN_ID, END_ID, PAD_ID
from suite.errors import DataError, SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.microbatch import ReplicaBatch, even_split_sizes, replica_share
from suite.settings import TextSettings, TrainSettings

_HELD_OUT_SEED, _HELD_OUT_TEMPERATURE = 0, 5.0
"""Seed and temperature of the validation sample: fixed, so that runs with other ones are scored on the same pairs."""

ROW_WIDTH = 64
"""The width in tokens to which pairs are packed, on each side; a longer ``text.max_length`` replaces it. Wider rows are
filled better, but attention also computes the pairs of places that are of different sentences."""

MULTIPLE = 8
"""Widths of rows are padded to multiples of it, so that there are few shapes."""


class TranslationBatches:
    """The training mini-batches of a run, by step and replica, and its held-out mini-batches.

    Pairs are selected and packed by their lengths alone. Only the tokens of a replica's own share are read.
    """

    def __init__(
        self, data: TextData, text: TextSettings, train: TrainSettings, replicas: int, micro_batches: int
    ) -> None:
        self._data = data
        self._text = text
        self._batch_tokens, self._valid_pairs = train.batch_tokens, train.valid_pairs
        self._replicas, self._micro_batches = replicas, micro_batches
        self._sampler = PairSampler(
            data.sizes[TRAIN],
            text.temperature,
            train.seed,
            data.drawn(text.languages),
            chosen_pairs(data, text, train.seed),
        )
        self._language_ids = np.array([data.language_id(language) for language in data.languages])
        self._lengths = lru_cache(data.lengths)

    def batch(self, step: int, replica: int, inputs: bool = True, targets: bool = True) -> ReplicaBatch:
        """Returns the share of ``replica`` in the mini-batch of ``step``.

        A micro-batch is inputs (source (B, S), target_in (B, T)) and targets (labels (B, T)), int64, padded with 0 to
        multiples of ``MULTIPLE``. Without ``inputs``, or without ``targets``, these are empty. A row has one or several
        pairs. The divisor counts the labels of the whole mini-batch, about ``train.batch_tokens``.
        Raises SettingError when the mini-batch has fewer pairs than there are replicas.
        """
        draws, lengths = self._training_pairs(step)
        parts = self._cut(lengths, self._replicas * self._micro_batches, self._batch_tokens)
        if len(parts) < self._replicas:
            raise SettingError(
                f"the mini-batch of step {step + 1} has {len(parts)} pairs for {self._replicas} replicas; "
                f"raise train.batch_tokens, now {self._batch_tokens}"
            )
        share = replica_share(len(parts), replica, self._replicas)
        read = self._tensors(TRAIN, draws, parts[share], inputs, targets)
        return ReplicaBatch(*read, _label_count(lengths), share.start)

    def held_out(self, inputs: bool = True, targets: bool = True) -> list[ReplicaBatch]:
        """Returns a fixed sample of ``train.valid_pairs`` validation pairs in one direction, or of all pairs in both
        directions if these are fewer.

        The pairs are of the languages that the run trains on, in a fixed order for each language: for a language that
        two runs share, the run with fewer pairs has the first ones of the other's. Each micro-batch is of one language,
        a group of the mini-batch. Each mini-batch is for one replica and has about ``train.batch_tokens`` labels, each
        micro-batch at most about a part in M of that.
        Raises DataError when there are no validation pairs.
        """
        counts, drawn = self._data.sizes[VALID], self._data.drawn(self._text.languages)
        if not any(counts[language] for language in drawn):
            scope = f" in {', '.join(self._text.languages)}" if self._text.languages else ""
            raise DataError(f"the text has no validation pairs{scope}; use a larger corpus or other languages")
        draws = self._held_out_draws(drawn)[: self._valid_pairs]
        lengths = self._pair_lengths(VALID, draws)
        most = max(1, self._batch_tokens // self._micro_batches)
        parts: list[Rows] = []
        for language in np.unique(draws.languages):
            own = np.flatnonzero(draws.languages == language)
            labels = int(_label_count(lengths[own]))
            cut = self._cut(lengths[own], -(-labels // most), labels)
            parts += [Rows(own[part.pairs], part.counts) for part in cut]
        # micro-batches of similar length follow each other
        order = _by_width(np.stack([part.totals(lengths)[-1] for part in parts]))
        batches = []
        for group in _grouped([parts[at] for at in order], lengths, self._batch_tokens):
            codes = [self._data.languages[draws.languages[part.pairs[0]]] for part in group]
            labels_of = [_label_count(lengths[part.pairs]) for part in group]
            tensors = self._tensors(VALID, draws, group, inputs, targets)
            batches.append(ReplicaBatch(*tensors, sum(labels_of), groups=list(zip(codes, labels_of, strict=True))))
        return batches

    def _held_out_draws(self, drawn: Sequence[int]) -> Draws:
        """Returns all validation pairs of some languages in both directions. Of the first n, the languages have shares
        by their weights, as far as they have pairs."""
        counts = np.array(self._data.sizes[VALID])
        languages = np.repeat(drawn, 2 * counts[drawn])
        entries, places = [], []
        weights = temperature_weights(counts[drawn].tolist(), _HELD_OUT_TEMPERATURE)
        for language, weight in zip(drawn, weights, strict=True):
            random = np.random.default_rng([_HELD_OUT_SEED, *self._data.languages[language].encode()])
            entries.append(random.permutation(2 * counts[language]))
            places.append((np.arange(2 * counts[language]) + 0.5) / weight)
        entry = np.concatenate(entries)
        draws = Draws(languages, (np.cumsum(counts) - counts)[languages] + entry // 2, entry % 2 == 0)
        return draws[np.lexsort((languages, np.concatenate(places)))]

    def _cut(self, lengths: Integers, count: int, labels: int) -> list[Rows]:
        """Packs pairs with about ``labels`` labels into ``count`` micro-batches of equally many rows, the narrowest
        first; fewer if there are fewer pairs."""
        each = max(1, round(labels / (count * max(ROW_WIDTH, self._text.max_length))))
        rows = pack(lengths, count * each)
        order = _by_width(rows.totals(lengths))
        ends = np.cumsum(even_split_sizes(len(order), count)[::-1])
        return [rows.take(own) for own in np.split(order, ends[:-1])]

    def _training_pairs(self, step: int) -> tuple[Draws, Integers]:
        """Returns the pairs of a step until their labels reach ``train.batch_tokens``, and their lengths."""
        count, labels = self._batch_tokens // ROW_WIDTH + 1, np.zeros(1)
        while labels[-1] < self._batch_tokens:
            count *= 2
            draws = self._sampler.draws(step, count)
            lengths = self._pair_lengths(TRAIN, draws)
            labels = np.cumsum(lengths[:, 1])
        end = int(np.searchsorted(labels, self._batch_tokens)) + 1
        return draws[:end], lengths[:end]

    def _pair_lengths(self, split: str, draws: Draws) -> Integers:
        """Returns the tokens of each pair, (pairs, 2), special ones included: source ``<2xx> ... </s>``, labels
        ``... </s>``."""
        lengths = self._lengths(split)[draws.pair_indices].astype(np.int64)
        return np.where(draws.from_english[:, None], lengths, lengths[:, ::-1]) + np.array([MARKS, 1])

    def _tensors(
        self, split: str, draws: Draws, parts: Sequence[Rows], inputs: bool, targets: bool
    ) -> tuple[list[Tensors], list[Tensors]]:
        """Returns inputs and targets of micro-batches; of one that is not asked for, empty tuples."""
        draws = draws[np.concatenate([part.pairs for part in parts])]
        sentences, pair = pa.concat_arrays(self._data.id_lists(split, draws.pair_indices)), np.arange(len(draws))
        sources, translations = (
            sentences.take(pa.array(pair + len(draws) * (draws.from_english != english))) for english in (True, False)
        )
        labels, lengths = _with_marks(translations)
        found: list[list[Tensors]] = [[()] * len(parts), [()] * len(parts)]
        if inputs:
            wanted = np.where(draws.from_english, self._language_ids[draws.languages], self._data.english_id)
            # each target sentence begins with the begin mark, where the labels before it end
            before = np.roll(labels, 1)
            before[before == END_ID] = BEGIN_ID
            source = _rectangles(*_with_marks(sources, wanted), parts)
            found[0] = list(zip(source, _rectangles(before, lengths, parts), strict=True))
        if targets:
            found[1] = [(rectangle,) for rectangle in _rectangles(labels, lengths, parts)]
        return found[0], found[1]


def _with_marks(sentences: pa.ListArray, first: Integers | None = None) -> tuple[Integers, Integers]:
    """Returns sentences one after another, each with the end mark, and after its ``first`` token if there is one; and
    their lengths. Raises DataError for a sentence with an end mark of its own: the model would read two."""
    lengths = sentences.value_lengths().to_numpy() + (1 if first is None else MARKS)
    ends = np.cumsum(lengths)
    ids = np.full(ends[-1], END_ID, dtype=np.int64)
    is_word = np.ones(len(ids), dtype=bool)
    is_word[ends - 1] = False
    if first is not None:
        ids[ends - lengths], is_word[ends - lengths] = first, False
    words = sentences.flatten().to_numpy()
    if (words == END_ID).any():
        raise DataError(f"a sentence of the prepared text has the token {END_ID}, the end mark; prepare the text again")
    ids[is_word] = words
    return ids, lengths


def _rectangles(ids: Integers, lengths: Integers, parts: Sequence[Rows]) -> list[Tensor]:
    """Returns one side of each micro-batch, (rows, padded width). ``lengths`` are those of the pairs, whose ids follow
    each other."""
    rows = Rows(np.arange(len(lengths)), np.concatenate([part.counts for part in parts])).totals(lengths)
    tensors, begin = [], 0
    for own in np.split(rows, np.cumsum([len(part.counts) for part in parts])[:-1]):
        end = begin + own.sum()
        tensors.append(fill_rectangle(ids[begin:end], own, PAD_ID, MULTIPLE))
        begin = end
    return tensors


def _by_width(lengths: Integers) -> Integers:
    """Returns the order of rows of these lengths, (rows, 2): ascending, the wider side is the first key. This needs
    less padding than sorting by the sum or by one side."""
    wide = padded(lengths, MULTIPLE)
    return np.lexsort((lengths[:, 1], lengths[:, 0], wide.sum(1), wide.max(1)))


def _label_count(lengths: Integers) -> float:
    return float(lengths[:, 1].sum())


def _grouped(parts: Sequence[Rows], lengths: Integers, tokens: int) -> Iterator[list[Rows]]:
    group: list[Rows] = []
    labels = 0.0
    for part in parts:
        own = _label_count(lengths[part.pairs])
        labels += own
        if group and labels > tokens:
            yield group
            group, labels = [], own
        group.append(part)
    if group:
        yield group
