"""Tokenised sentences as rows of an Arrow table: language, English ids, translation ids, and text if held out."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from suite.data.text.cleaning import Sentences
from suite.data.text.tokenizer import encode_all

MARKS = 2
"""Special tokens of a side: language or begin, and end."""


class _Ragged:
    """Many short id lists in two arrays, because a million Python lists need gigabytes."""

    def __init__(self, lists: list[list[int]], vocabulary: int) -> None:
        self.lengths = np.fromiter(map(len, lists), dtype=np.int32, count=len(lists))
        small = vocabulary <= np.iinfo(np.uint16).max + 1  # half the bytes to store and to send
        kind = np.uint16 if small else np.int32
        self.values = np.fromiter(chain.from_iterable(lists), dtype=kind, count=int(self.lengths.sum()))
        self.starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(self.lengths, dtype=np.int32)])

    def arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(self.starts), pa.array(self.values))


def token_table(
    sentences: Sentences, tokenizer: PreTrainedTokenizerFast, max_length: int, with_text: bool, first: int = 0
) -> tuple[pa.Table, list[int]]:
    """Returns the rows, grouped by language in sorted order, and the number of rows of each language. The first
    language has index ``first``.

    Drops pairs with a side longer than ``max_length`` tokens, special tokens included.
    """
    texts = sorted({english for pairs in sentences.values() for english, _ in pairs})
    row_of = {english: row for row, english in enumerate(texts)}
    english = _Ragged(encode_all(tokenizer, texts), len(tokenizer))
    longest = max_length - MARKS
    tables: list[pa.Table] = []
    sizes: list[int] = []
    for index, language in enumerate(sorted(sentences), first):
        pairs = sentences[language]
        rows = np.fromiter((row_of[e] for e, _ in pairs), dtype=np.int64, count=len(pairs))
        translation = _Ragged(encode_all(tokenizer, [t for _, t in pairs]), len(tokenizer))
        kept = np.flatnonzero((english.lengths[rows] <= longest) & (translation.lengths <= longest))
        columns = {
            "language": pa.array(np.full(len(kept), index, dtype=np.int16)),
            "english": english.arrow().take(pa.array(rows[kept])),
            "translation": translation.arrow().take(pa.array(kept)),
        }
        if with_text:
            columns["english_text"] = pa.array([pairs[i][0] for i in kept.tolist()], type=pa.string())
            columns["translation_text"] = pa.array([pairs[i][1] for i in kept.tolist()], type=pa.string())
        tables.append(pa.table(columns))
        sizes.append(len(kept))
    return pa.concat_tables(tables), sizes
