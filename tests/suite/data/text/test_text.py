"""Prepared text as its readers see it."""

import pytest

from suite.data.text.prepare import folder_of
from suite.data.text.splitting import TEST, TRAIN
from suite.data.text.text import TextData


def test_whoever_does_not_ask_for_the_test_pairs_gets_none(data: TextData, settings, cache) -> None:
    """Training, validation and tuning do not ask."""
    assert data.token_ids(TEST, [0])
    without = TextData(folder_of(settings, cache))
    assert without.token_ids(TRAIN, [0])
    for read in (without.token_ids, without.texts):
        with pytest.raises(KeyError):
            read(TEST, [0])
