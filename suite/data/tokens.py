"""What the tokenizers of all tasks share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text, on all cores. None of them is special: a special token's name in a text, such as
    ``<2de>``, is encoded as its characters."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # transformers sets it anew at each of its own calls
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the SHA-256 of a vocabulary: equal for two exactly when their token ids agree."""
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
