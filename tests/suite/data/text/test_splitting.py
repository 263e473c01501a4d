"""Nothing held out is seen in training, in any language and in any variant of its English."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from suite.data.text.cleaning import Sentences
from suite.data.text.splitting import SHARES, SPLITS, TEST, TRAIN, VALID, group_key, split

WORDS = st.sampled_from(["user", "users", "City", "cities", "%s", "{name}", "delete", "Delete!", "box", "boxes", "the"])
ENGLISH = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
CORPUS = st.dictionaries(
    st.sampled_from(["de", "fr", "ja"]),
    st.lists(st.tuples(ENGLISH, st.text("abc", min_size=1, max_size=2)), max_size=60),
)


def keys(sentences: Sentences) -> set[str]:
    return {group_key(english) for pairs in sentences.values() for english, _ in pairs}


def assert_disjoint(parts: dict[str, Sentences]) -> None:
    seen = [keys(parts[name]) for name in SPLITS]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_variants_of_one_string_have_one_key():
    variants = ["Delete %s user", "delete users!", "User: delete", "Delete the".replace("the", "{name} user")]
    assert {group_key(text) for text in variants} == {"delete user"}
    assert group_key("Delete cities") == group_key("city, Delete")
    assert len({group_key(text) for text in ["pass", "pas", "!", "?", "is"]}) == 5
    assert len({group_key(text) for text in ["%s: %s", "%s - %d", "{name}", "(%s)"]}) == 1


@given(CORPUS)
def test_no_group_is_in_two_splits_and_no_pair_is_lost(sentences: Sentences):
    parts = split(sentences)
    assert_disjoint(parts)
    for language, pairs in sentences.items():
        assert sorted(pair for name in SPLITS for pair in parts[name][language]) == sorted(pairs)


def test_django_is_split_within_its_caps(sentences: Sentences):
    parts = split(sentences)
    assert_disjoint(parts)
    assert parts == split(dict(reversed(sentences.items())))
    for name, share in SHARES.items():
        held = {language: len(pairs) for language, pairs in parts[name].items()}
        assert all(count <= share.language_share * len(sentences[language]) for language, count in held.items())
        assert sum(count > 0 for count in held.values()) > 80
        assert len(keys(parts[name])) <= share.groups
    assert sum(map(len, parts[TRAIN].values())) > 0.8 * sum(map(len, sentences.values()))
    assert sum(map(len, parts[TEST].values())) > sum(map(len, parts[VALID].values())) > 512
