"""Tokenised sentences as rows of an Arrow table: language, English ids, translation ids, and text if held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from suite.data.text.cleaning import Sentences
from suite.data.text.splitting import TRAIN
from suite.data.tokens import encode_all

MARKS = 2
"""Special tokens of a side: language or begin, and end."""


@dataclass(frozen=True)
class CleanText:
    """The cleaned text of a corpus in memory, by split."""

    parts: Mapping[str, Sentences]

    @property
    def sizes(self) -> dict[str, dict[str, int]]:
        """{split: {language: number of pairs}}."""
        return {name: {language: len(pairs) for language, pairs in of.items()} for name, of in self.parts.items()}

    def sample(self) -> Sentences:
        """Returns the text that the tokenizer learns from."""
        return self.parts[TRAIN]

    def tokenise(self, split: str, tokenizer: PreTrainedTokenizerFast, max_length: int) -> tuple[Dataset, list[int]]:
        """Returns a split's rows, and the number of rows of each language."""
        table, sizes = token_table(self.parts[split], tokenizer, max_length, split != TRAIN)
        return Dataset(table), sizes


def token_table(
    sentences: Sentences, tokenizer: PreTrainedTokenizerFast, max_length: int, with_text: bool
) -> tuple[pa.Table, list[int]]:
    """Returns the rows, grouped by language in sorted order, and the number of rows of each language.

    Drops pairs with a side longer than ``max_length`` tokens, special tokens included.
    """
    # two bytes a token, if they hold it, are half the bytes to store and to send
    kind = pa.list_(pa.uint16() if len(tokenizer) <= 2**16 else pa.int32())
    texts = sorted({english for pairs in sentences.values() for english, _ in pairs})
    row_of = {english: row for row, english in enumerate(texts)}
    english_ids = pa.array(encode_all(tokenizer, texts), kind)
    tables, sizes = [], []
    for language in sorted(sentences):
        pairs = sentences[language]
        english = english_ids.take(pa.array([row_of[text] for text, _ in pairs], pa.int64()))
        translation = pa.array(encode_all(tokenizer, [text for _, text in pairs]), kind)
        longest = np.maximum(*(pc.list_value_length(side).to_numpy() for side in (english, translation)))
        kept = np.flatnonzero(longest <= max_length - MARKS)
        columns = {
            "english": english.take(pa.array(kept)),
            "translation": translation.take(pa.array(kept)),
        }
        if with_text:
            columns["english_text"] = pa.array([pairs[i][0] for i in kept.tolist()], type=pa.string())
            columns["translation_text"] = pa.array([pairs[i][1] for i in kept.tolist()], type=pa.string())
        tables.append(pa.table(columns))
        sizes.append(len(kept))
    return pa.concat_tables(tables), sizes
