"""A byte-level BPE tokenizer, as GPT-2's: every text has tokens, and decoding returns it byte by byte.

    id  0      1              2 ... 257       then
        <pad>  <|endoftext|>  single bytes    pieces, in the order they were learned

The end token follows each document. A text that has its name in it is encoded as ordinary characters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from suite.errors import SettingError

PAD, END = "<pad>", "<|endoftext|>"
PAD_ID, END_ID = 0, 1
SPECIAL = (PAD, END)

_CHARACTERS = 20_000_000
"""Characters that the pieces are learned from; more change them little."""


def train_tokenizer(documents: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learns the pieces from documents spread over all; the result has ``vocabulary`` entries, or fewer for a
    small text.

    Raises SettingError when it is too small for the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(SPECIAL) + len(alphabet):
        raise SettingError(
            f"text.vocabulary is {vocabulary}, and {len(SPECIAL)} special tokens and {len(alphabet)} bytes need "
            f"{len(SPECIAL) + len(alphabet)}; set it to that or more"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    step = max(1, -(-sum(map(len, documents)) // _CHARACTERS))  # every n-th of too many
    backend.train_from_iterator(documents[::step], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, bos_token=END, clean_up_tokenization_spaces=False
    )


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64]:
    """Returns the bytes of text that each token stands for, by id; a special token stands for none."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([0 if token in SPECIAL else len(token) for token in tokens])  # a character for each byte
