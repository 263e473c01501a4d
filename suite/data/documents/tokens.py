"""Prepared documents: a tokenizer, and each split as one sequence of token ids, memory-mapped from disk.

<folder>/documents.json  tokenizer/  train.npy  valid.npy  test.npy  manifest.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from suite.data.documents.folder import TEST, TRAIN, VALID
from suite.data.documents.tokenizer import END_ID
from suite.data.tokens import encode_all, vocabulary_digest

INFO_FILE, TOKENIZER = "documents.json", "tokenizer"
_ENCODED_AT_ONCE = 1000


class TokenData:
    """Documents ready to train on: each split is all its documents, each followed by the end token."""

    def __init__(self, folder: Path) -> None:
        """Opens a prepared folder; the tokens stay on disk. The caller must check that the folder is valid."""
        info = json.loads((folder / INFO_FILE).read_text())
        self.corpus: str = info["corpus"]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / TOKENIZER)
        self.splits: dict[str, NDArray[Any]] = {
            split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in info["tokens"]
        }

    @property
    def held_out(self) -> str:
        """The split that the run's end is evaluated on: valid, or test in a folder without valid files."""
        return VALID if VALID in self.splits else TEST

    @property
    def counts(self) -> dict[str, int]:
        return {split: len(tokens) for split, tokens in self.splits.items()}

    @property
    def train(self) -> NDArray[Any]:
        return self.splits[TRAIN]

    @property
    def digest(self) -> str:
        return vocabulary_digest(self.tokenizer)


def write_tokens(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, path: Path) -> int:
    """Writes documents as one array of ids, of two bytes each if they fit; returns their number."""
    kind = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    parts = []
    for first in range(0, len(documents), _ENCODED_AT_ONCE):
        for ids in encode_all(tokenizer, documents[first : first + _ENCODED_AT_ONCE]):
            parts.append(np.array([*ids, END_ID], dtype=kind))
    tokens = np.concatenate(parts)
    np.save(path, tokens)
    return len(tokens)
