"""The vocabulary has the requested size, loses no text, and is the same every time."""

from __future__ import annotations

from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.inference.model_text import source_of
from suite.data.text.cleaning import Sentences
from suite.data.text.text import TextData
from suite.data.text.tokenizer import language_token, train_tokenizer
from suite.data.tokens import encode_all
from suite.errors import SettingError


@pytest.fixture
def few(sentences: Sentences) -> Sentences:
    return {code: sentences[code] for code in ("de", "ja")}


def test_the_vocabulary_has_exactly_the_entries_asked_for(few: Sentences):
    vocabulary = 600
    tokenizer = train_tokenizer(few, vocabulary)
    assert len(tokenizer) == vocabulary
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocabulary))
    assert tokenizer.get_vocab() == train_tokenizer(few, vocabulary).get_vocab()


def test_decomposed_text_gives_no_more_entries_than_asked_for():
    """Korean as macOS writes it: 67 letters, of which the tokenizer makes thousands of syllables."""
    syllables = [normalize("NFD", chr(code)) for code in range(0xAC00, 0xAC00 + 2400)]
    pairs = [(f"word {at}", "".join(syllables[at : at + 4])) for at in range(2400)]
    assert len(train_tokenizer({"ko": pairs}, 2000)) == 2000


def test_special_ids(data: TextData):
    tokenizer = data.tokenizer
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<unk>", "<s>", "</s>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2, 3)
    ids = [data.language_id(language) for language in data.languages]
    assert len({*ids, data.english_id}) == len(data.languages) + 1
    assert tokenizer.convert_ids_to_tokens(data.english_id) == language_token("en") == "<2en>"
    assert data.tokenizer.tokenize("<2pt_BR> x")[0] == "<2pt_BR>"


def test_text_comes_back_from_its_ids(data: TextData):
    rows = data.splits["valid"]
    for column in ("english_text", "translation_text"):
        texts = list(rows[column])
        assert len(texts) > 500
        ids = encode_all(data.tokenizer, texts)
        assert ids == list(rows[column.removesuffix("_text")])
        assert data.tokenizer.batch_decode(ids) == texts


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20))
def test_unseen_characters_come_back_too(data: TextData, text: str):
    text = normalize("NFKC", " ".join(text.split()))
    if not text or "\u2581" in text or " " in text:  # the mark of a space, and what NFKC makes spaces of
        return
    ids = encode_all(data.tokenizer, [text])[0]
    assert data.tokenizer.unk_token_id not in ids
    assert data.tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["<pad>", "<unk>", "<s>", "</s>", "<2de>", "a<2de>b"])
def test_a_special_tokens_name_in_a_text_is_text(data: TextData, name: str):
    (ids,) = encode_all(data.tokenizer, [name])
    assert not set(ids) & set(data.tokenizer.all_special_ids)
    assert data.tokenizer.decode(ids) == name
    source = source_of(name, "de", data, 64)
    assert source == [data.language_id("de"), *ids, 3]


def test_a_vocabulary_that_is_too_small_says_how_large(few: Sentences):
    needed = 4 + len(few) + 1 + 256 + 64  # special tokens, languages and English, bytes, pieces
    with pytest.raises(SettingError, match=f"is {needed - 1}, .* set text.vocabulary={needed} or more"):
        train_tokenizer(few, needed - 1)
    assert len(train_tokenizer(few, needed)) == needed


def test_a_vocabulary_that_the_text_cannot_fill_has_what_it_gives_and_the_others_decode_to_nothing():
    few = {"de": [("Save the file", "Datei sichern"), ("Open", "Öffnen")]}
    tokenizer = train_tokenizer(few, 1000)
    assert 4 + 2 + 256 < len(tokenizer) < 1000
    assert tokenizer.decode([*tokenizer("Open").input_ids, 999], skip_special_tokens=True) == "Open"
