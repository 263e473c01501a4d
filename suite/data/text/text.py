"""Prepared text: a tokenizer and three splits of tokenised pairs, memory-mapped from disk.

    <folder>/text.json  tokenizer/  train/  valid/  test/  manifest.json

The rows of a split are grouped by language, so the j-th pair of a language is one look-up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_from_disk
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from suite.data.text.splitting import SPLITS, TRAIN, VALID
from suite.data.text.tokenizer import ENGLISH, language_token
from suite.data.tokens import vocabulary_digest
from suite.errors import SettingError, nearest

INFO_FILE, TOKENIZER = "text.json", "tokenizer"
SIDES = ("english", "translation")


class TextData:
    """Text ready to train on. ``sizes[split][i]`` is the number of pairs of ``languages[i]`` in a split."""

    def __init__(self, folder: Path, *, with_test: bool = False) -> None:
        """Opens a prepared folder; the splits stay on disk. The caller must check that the folder is valid."""
        info = json.loads((folder / INFO_FILE).read_text())
        self.corpus: str = info["corpus"]
        self.languages: tuple[str, ...] = tuple(info["languages"])
        self.sizes: dict[str, tuple[int, ...]] = {split: tuple(info["sizes"][split]) for split in SPLITS}
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)
        self.splits: dict[str, Dataset] = {
            split: load_from_disk(str(folder / split), keep_in_memory=False)
            if sum(self.sizes[split])
            else Dataset.from_dict({})  # datasets cannot load what it saved without rows
            for split in (SPLITS if with_test else (TRAIN, VALID))
        }
        """The splits that may be read. The test pairs are opened to score and to time decoding, never to train."""

    @property
    def pairs(self) -> dict[str, int]:
        """Training pairs of each language: the D_l of temperature sampling."""
        return dict(zip(self.languages, self.sizes[TRAIN], strict=True))

    def drawn(self, languages: Sequence[str] | None) -> list[int]:
        """Returns the indices of these languages; None selects all.

        Raises SettingError for a language that the text lacks, or one without training pairs.
        """
        if languages is None:
            return list(range(len(self.languages)))
        for language in languages:
            if language not in self.languages:
                raise SettingError(
                    f"text.languages has {language}, which is not one of the {len(self.languages)} languages "
                    f"prepared of {self.corpus}; {nearest(language, self.languages)}"
                )
            if not self.pairs[language]:
                raise SettingError(
                    f"text.languages has {language}, but {self.corpus} has no pair of it that is short enough to train "
                    "on; raise text.max_length or remove the language"
                )
        return sorted({self.languages.index(language) for language in languages})

    def language_id(self, language: str) -> int:
        """Returns the id of the target-language token of a language."""
        token_id = self.tokenizer.convert_tokens_to_ids(language_token(language))
        assert isinstance(token_id, int), language
        assert token_id != self.tokenizer.unk_token_id, language
        return token_id

    @property
    def digest(self) -> str:
        return vocabulary_digest(self.tokenizer)

    @property
    def english_id(self) -> int:
        return self.language_id(ENGLISH)

    def lengths(self, split: str) -> NDArray[Any]:
        """Returns the tokens of English and translation of each row, (rows, 2), without special tokens, in the smallest
        type that holds them; O(split)."""
        table = self.splits[split].data
        lengths = [pc.list_value_length(table.column(side)).to_numpy() for side in SIDES]
        longest = max(int(side.max()) for side in lengths)
        return np.stack(lengths, axis=1, dtype=np.min_scalar_type(longest), casting="unsafe")

    def id_lists(self, split: str, rows: Sequence[int] | NDArray[np.int64]) -> tuple[pa.ListArray, pa.ListArray]:
        """Returns English and translation of each row as token ids without special tokens; O(rows)."""
        table = self.splits[split].with_format("arrow", columns=list(SIDES))[rows]
        english, translation = (table[side].combine_chunks() for side in SIDES)
        return english, translation

    def token_ids(self, split: str, rows: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Returns the same in Python's lists."""
        return list(zip(*(lists.to_pylist() for lists in self.id_lists(split, list(rows))), strict=True))

    def texts(self, split: str, rows: Sequence[int]) -> list[tuple[str, str]]:
        """Returns (English, translation) of each row as text; only held-out splits have text."""
        table = self.splits[split].with_format("arrow", columns=["english_text", "translation_text"])[list(rows)]
        return list(zip(table["english_text"].to_pylist(), table["translation_text"].to_pylist(), strict=True))
