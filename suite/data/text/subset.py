"""Low-resource languages made from larger ones: a language cut to n of its training pairs (``text.train_pairs``).

    gl  9,196 pairs  --train_pairs=gl:500, seed 0-->  500 of them    seed 1: 500 others    gl:2000, seed 0: also more

The validation and test pairs stay those of the whole corpus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from suite.data.text.splitting import TRAIN
from suite.data.text.text import TextData
from suite.errors import SettingError, nearest
from suite.settings import TextSettings


def train_counts(data: TextData, text: TextSettings) -> dict[str, int]:
    """Returns D_l, the training pairs of each language of the corpus, after ``text.train_pairs``.

    Raises SettingError for a count of a language that the run does not train on, and for more pairs than there are.
    """
    counts = data.pairs
    for language, count in _limits(text.train_pairs or ()).items():
        if language not in counts:
            raise SettingError(
                f"text.train_pairs has {language}, which is not one of the {len(counts)} languages of {data.corpus}; "
                f"{nearest(language, counts)}"
            )
        if text.languages is not None and language not in text.languages:
            raise SettingError(
                f"text.train_pairs has {language}, which text.languages ({', '.join(text.languages)}) leaves out; "
                "add it there or remove it here"
            )
        if count > counts[language]:
            raise SettingError(
                f"text.train_pairs asks for {count:,} pairs of {language}, and {data.corpus} has {counts[language]:,} "
                f"of at most {text.max_length} tokens; ask for fewer, or remove {language} to train on all"
            )
        counts[language] = count
    return counts


def chosen_pairs(data: TextData, text: TextSettings, seed: int) -> Mapping[int, NDArray[np.int64]]:
    """Returns the pairs drawn for each limited language, by the language's index: int64 places within the language.

    They depend on the seed, the language and its pairs. Of two counts with one seed, the larger includes the smaller.
    """
    counts = train_counts(data, text)
    chosen = {}
    for language in _limits(text.train_pairs or ()):
        at = data.languages.index(language)
        random = np.random.default_rng([seed, *language.encode()])
        chosen[at] = random.permutation(data.sizes[TRAIN][at])[: counts[language]].astype(np.int64)
    return chosen


def _limits(train_pairs: Sequence[str]) -> dict[str, int]:
    return {language: int(count) for language, _, count in (limit.partition(":") for limit in train_pairs)}
