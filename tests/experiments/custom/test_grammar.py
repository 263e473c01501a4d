"""A model out of odd layers trains as plain PyTorch trains the user's own objects, or one sentence refuses it.

RANDOM_LAYERS=300 pytest -n 0 --timeout 0 tests/experiments/custom/test_grammar.py      so many models
"""

import os
from collections import Counter

import pytest
import torch

from experiments.custom import layer_check
from experiments.custom.trial import Trial
from tests.experiments.custom.grammar import PRODUCTIONS, Layer, W, draw
from tests.experiments.custom.grammar_run import outcomes, refusal

FOUND = (996,)
"""Seeds that trained something else: a first layer that drops itself got no gradient (mended). With other productions
another seed draws it."""

COUNT = int(os.environ.get("RANDOM_LAYERS", "10"))
"""``make test-faults`` has two thousand."""


def test_models_train_as_plain_pytorch_or_are_refused_in_one_sentence():
    found = outcomes([f"{draw.__name__}:seed_{seed}" for seed in (*range(COUNT), *FOUND)])
    counts = Counter(said.split(":")[0] for said in found.values())
    assert not {source: said for source, said in found.items() if said.split(":")[0] not in ("trained", "refused")}
    assert counts["trained"] > COUNT / 2, counts


@pytest.mark.parametrize("name", PRODUCTIONS)
def test_what_a_pipeline_cannot_repeat_send_or_copy_is_refused_with_the_reason_and_nothing_else(name):
    reason, said = PRODUCTIONS[name].refused, refusal(f"{draw.__name__}:alone_{name}")
    assert reason in said
    assert bool(reason) == bool(said), said


def test_other_rows_of_a_single_row_have_other_columns():
    (layer,) = PRODUCTIONS["adds_its_first_rows"].make()
    assert "returns other values after other rows" in layer_check.refusal(Trial(layer, (torch.arange(1.0, 7.0)[None],)))


def test_values_that_are_nan_each_time_are_the_same():
    assert not layer_check.refusal(Trial(Layer(lambda _, x: x * torch.nan), (torch.ones(4, W),)))
