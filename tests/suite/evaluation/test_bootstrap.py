"""The paired bootstrap: clear differences, means, and how often it finds what is not there."""

import random

import pytest

from suite.evaluation.bootstrap import TwoTranslations, paired_bootstrap
from suite.evaluation.scores import score

WORDS = ["open", "the", "file", "save", "all", "changes", "now", "please", "close", "window"]


def sentences(chance, count):
    return tuple(" ".join(chance.choices(WORDS, k=6)) for _ in range(count))


def spoiled(chance, references, share):
    return tuple(" ".join(w if chance.random() > share else "x" for w in line.split()) for line in references)


def test_the_paired_bootstrap_tells_a_clear_difference_from_none():
    chance = random.Random(1)
    references = sentences(chance, 80)
    good, bad, same = (spoiled(chance, references, share) for share in (0.2, 0.6, 0.2))

    def test(first, second):
        return paired_bootstrap(((TwoTranslations(first, second, references),),))

    clear, opposite = test(good, bad), test(bad, good)
    assert clear.p_value == opposite.p_value == 1 / 1001
    assert clear.gain == pytest.approx(score(good, references)["chrf"] - score(bad, references)["chrf"])
    assert opposite.gain == pytest.approx(-clear.gain)
    assert test(good, same).p_value == test(same, good).p_value > 0.05
    assert test(good, good) == (0.0, 1.0)


def test_the_gain_is_the_mean_over_directions_then_over_texts():
    chance = random.Random(2)
    texts, expected = [], []
    for count, directions in ((30, 2), (50, 1)):
        of_text = []
        for _ in range(directions):
            references = sentences(chance, count)
            of_text.append(TwoTranslations(*(spoiled(chance, references, each) for each in (0.3, 0.5)), references))
        texts.append(tuple(of_text))
        gains = [
            score(each.first, each.references)["chrf"] - score(each.second, each.references)["chrf"] for each in of_text
        ]
        expected.append(sum(gains) / directions)
    assert paired_bootstrap(tuple(texts)).gain == pytest.approx(sum(expected) / 2)


@pytest.mark.slow
def test_models_that_do_not_differ_have_a_p_value_below_a_fifth_in_a_fifth_of_cases():
    """Both directions of a pair are equally good or bad here, so as independent lines they would differ too often."""
    chance, below, cases = random.Random(3), 0, 200
    for _ in range(cases):
        references = sentences(chance, 40)
        both = TwoTranslations(*(spoiled(chance, references, 0.4) for _ in range(2)), references)
        below += paired_bootstrap(((both, both),)).p_value < 0.2
    # a binomial count with mean 40 and deviation 5.7; twice as many with one tail, or with independent directions
    assert 23 <= below <= 57
