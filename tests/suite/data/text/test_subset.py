"""A language cut to n of its training pairs."""

import pytest

from suite.data.text.sampling import PairSampler, temperature_weights
from suite.data.text.splitting import TRAIN
from suite.data.text.subset import chosen_pairs, train_counts
from suite.errors import SettingError
from suite.settings import TextSettings


def limited(settings, *limits, **changes):
    return TextSettings.model_validate(settings.model_dump() | {"train_pairs": limits} | changes)


def rows_drawn(data, text, seed, language, count=4000):
    among, chosen = data.drawn(text.languages), chosen_pairs(data, text, seed)
    sampler = PairSampler(data.sizes[TRAIN], text.temperature, seed, among, chosen)
    draws = sampler.draws(0, count)
    return set(draws.pair_indices[draws.languages == data.languages.index(language)].tolist()), sampler


def test_exactly_n_pairs_of_the_language_are_drawn_and_all_others_as_before(data, settings):
    text = limited(settings, "de:20", languages=("de", "nl"))
    rows, sampler = rows_drawn(data, text, 3, "de")
    at = data.languages.index("de")
    first = sum(data.sizes[TRAIN][:at])
    assert len(rows) == 20
    assert min(rows) >= first
    assert max(rows) < first + data.sizes[TRAIN][at]
    assert rows == {first + place for place in chosen_pairs(data, text, 3)[at].tolist()}
    wanted = temperature_weights([20, data.pairs["nl"]], 5.0)
    assert [sampler.weights[data.languages.index(code)] for code in ("de", "nl")] == pytest.approx(wanted)
    others, _ = rows_drawn(data, text, 3, "nl")
    assert len(others) > 20


def test_another_seed_draws_other_pairs_and_a_larger_count_keeps_the_smaller_ones(data, settings):
    few, many = limited(settings, "de:20"), limited(settings, "de:60")
    small, large, other = (
        set(chosen_pairs(data, text, seed)[data.languages.index("de")].tolist())
        for text, seed in ((few, 0), (many, 0), (few, 1))
    )
    assert small < large
    assert len(other) == 20
    assert other != small


def test_counts_are_those_of_the_corpus_but_for_the_limited(data, settings):
    assert train_counts(data, settings) == data.pairs
    assert train_counts(data, limited(settings, "de:7")) == data.pairs | {"de": 7}


@pytest.mark.parametrize(
    ("limits", "languages", "said"),
    [
        (("de:99999",), None, r"asks for 99,999 pairs of de, and django has [\d,]+ of at most"),
        (("xx:5",), None, "has xx, which is not one of the"),
        (("de:5",), ("nl",), r"has de, which text.languages \(nl\) leaves out"),
    ],
)
def test_what_the_corpus_cannot_give_is_an_error(data, settings, limits, languages, said):
    with pytest.raises(SettingError, match=said):
        train_counts(data, limited(settings, *limits, languages=languages))


@pytest.mark.parametrize("limit", ["de", "de:", ":5", "de:0", "de:-3", "de:many", "de:1.5"])
def test_a_limit_is_a_language_and_a_count(settings, limit):
    with pytest.raises(ValueError, match="languages with counts"):
        limited(settings, limit)
    with pytest.raises(ValueError, match="each language once"):
        limited(settings, "de:5", "de:6")
