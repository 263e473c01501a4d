"""Mini-batches of translation pairs: little padding, and what is refused. ``test_same_batches`` has their content."""

from __future__ import annotations

import pyarrow as pa
import pytest

from suite.data.text.batching import TranslationBatches
from suite.data.text.text import TextData
from suite.data.text.tokenizer import END_ID
from suite.errors import DataError, SettingError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.settings import TextSettings, TrainSettings


def batches(
    data: TextData, settings: TextSettings, replicas: int, micro_batches: int, tokens: int = 1024, **train_settings: int
):
    train = TrainSettings(batch_tokens=tokens, **train_settings)
    return TranslationBatches(data, settings, train, replicas, micro_batches)


@pytest.mark.parametrize(
    ("languages", "said"),
    [(("fi", "gaa"), "gaa.*did you mean ga"), (("en",), "text.languages has en")],
)
def test_a_language_that_is_not_there_is_an_error(data: TextData, settings: TextSettings, languages, said):
    with pytest.raises(SettingError, match=said):
        batches(data, settings.model_copy(update={"languages": languages}), 1, 4)


def share_of_tokens(parts: list[ReplicaBatch]) -> float:
    places = [tensor for part in parts for inputs in part.inputs for tensor in inputs]
    return sum(int((tensor != 0).sum()) for tensor in places) / sum(tensor.numel() for tensor in places)


@pytest.mark.parametrize(("tokens", "share"), [(1024, 0.85), (8192, 0.9)])
def test_little_of_a_mini_batch_is_padding(data: TextData, settings: TextSettings, tokens: int, share: float):
    loader = batches(data, settings, 1, 4, tokens, valid_pairs=500)
    assert share_of_tokens([loader.batch(step, 0) for step in range(8)]) > share
    assert share_of_tokens(loader.held_out()) > 0.6  # few pairs of a language


def test_more_replicas_than_pairs_is_an_error(data: TextData, settings: TextSettings):
    with pytest.raises(SettingError, match=r"pairs for 64 replicas; raise train.batch_tokens, now 16"):
        batches(data, settings, 64, 1, tokens=16).batch(0, 0)


def test_an_end_mark_within_a_sentence_is_refused(data: TextData, settings: TextSettings, monkeypatch):
    """The model would read two sentences, and no loss would show it."""
    lists = data.id_lists

    def with_end_mark(self, split, rows):
        english, translation = lists(split, rows)
        return pa.array([[*ids[:-1], END_ID] for ids in english.to_pylist()], english.type), translation

    monkeypatch.setattr(TextData, "id_lists", with_end_mark)
    with pytest.raises(DataError, match="a sentence of the prepared text has the token 3, the end mark"):
        batches(data, settings, 1, 4).batch(3, 0)
