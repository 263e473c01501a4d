"""Overlap of test and training texts: equal to a comparison of all pairs, and read from prepared text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.data.text.prepare import folder_of, prepare
from suite.data.text.splitting import TEST, TRAIN
from suite.data.text.text import TextData
from suite.evaluation.overlap import Overlap, closest_overlaps, pair_overlaps
from suite.settings import TextSettings
from tests.suite.data.text.pair_files import write_pairs

TEXTS = st.lists(st.lists(st.sampled_from("abcdefgAB"), max_size=7).map(" ".join), max_size=8)


def by_all_pairs(text, training):
    if text in training:
        return Overlap.EXACT
    if text.casefold() in {other.casefold() for other in training}:
        return Overlap.CASE_FOLDED
    words = set(text.casefold().split())
    for other in training:
        others = set(other.casefold().split())
        if words | others and 5 * len(words & others) >= 3 * len(words | others):
            return Overlap.NEAR
    return Overlap.NONE


@given(TEXTS, TEXTS)
def test_the_overlap_is_that_of_a_comparison_of_all_pairs(texts, training):
    assert closest_overlaps(texts, training) == [by_all_pairs(text, training) for text in texts]


def test_the_examples_of_the_docs():
    texts = ["Save the file", "save the File", "Save the file as", "Open the folder"]
    kinds = [Overlap.EXACT, Overlap.CASE_FOLDED, Overlap.NEAR, Overlap.NONE]
    assert closest_overlaps(texts, ["Save the file"]) == kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared own text with its own splits, so that every kind of overlap is there."""
    root = tmp_path_factory.mktemp("own")
    training = {
        "de": [(f"word{n} alpha{n} beta{n}", f"wort{n} alfa{n}") for n in range(100)],
        "nl": [(f"only{n} dutch{n}", f"woord{n} bet{n}") for n in range(100)],
    }
    test = [  # the reader drops training pairs with the same English, so only translations can be equal
        ("new1 new2 new3", "wort9 alfa9"),
        ("new4 new5 new6", "Wort9 Alfa9"),
        ("word3 alpha3", "etwas"),  # near: 2 of 3 words
        ("only8 dutch8 also", "anderes"),  # the same, of another language's English
        ("fresh1 fresh2", "bet7"),
    ]
    parts = {"train": training, "valid": {"de": test[-1:], "nl": test[-1:]}, "test": {"de": test, "nl": test[-1:]}}
    for split, languages in parts.items():
        for code, pairs in languages.items():
            write_pairs(root, split, pairs, code=code)
    settings = TextSettings(corpus=str(root), vocabulary=400, max_length=64, clean=False)
    cache = tmp_path_factory.mktemp("cache")
    prepare(settings, cache, lambda _: None)
    return folder_of(settings, cache)


def test_pairs_are_compared_with_all_english_and_with_their_own_language(folder):
    data = TextData(folder, with_test=True)
    found = pair_overlaps(data, {"de": range(data.sizes[TEST][0])})
    texts = [english for english, _ in data.texts(TEST, range(data.sizes[TEST][0]))]
    by_text = dict(zip(texts, found["de"], strict=True))
    assert by_text == {
        "new1 new2 new3": Overlap.EXACT,
        "new4 new5 new6": Overlap.CASE_FOLDED,
        "word3 alpha3": Overlap.NEAR,
        "only8 dutch8 also": Overlap.NEAR,
        "fresh1 fresh2": Overlap.NONE,
    }


def test_only_scoring_opens_the_test_pairs(folder: Path):
    data = TextData(folder)
    assert data.token_ids(TRAIN, [0])
    with pytest.raises(KeyError):
        data.token_ids(TEST, [0])
    with pytest.raises(KeyError):
        data.texts(TEST, [0])
