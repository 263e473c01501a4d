"""Seeded faults of a TrainSpec: it works, or one sentence says what is wrong."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.registry import find
from suite import TrainSpec
from suite.errors import SuiteError
from tests.experiments.custom.grammar import PRODUCTIONS, draw
from tests.experiments.custom.grammar import W as WIDTH

assert draw  # it has registered the productions
MODULE = "from tests.experiments.custom.test_mutations import mutated\n"


def good():
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
    data = TensorDataset(x, x[:, :4].argmax(1))
    return TrainSpec(layers=layers, loss=nn.CrossEntropyLoss(), train=data, valid=data, batch_size=8, steps=2, stages=2)


def failing(*arguments):
    raise KeyError("x\ny")


VALUES = (
    *[None, 0, -1, 3, 2.5, 1e9, float("nan"), True, "", "x", "é\0", b"bytes", [], (), {}, {"a": 1}, object()],
    *[failing, nn.Linear, nn.ReLU(), torch.zeros(3), range(5), iter([1]), [(1, 2)]],
    *[lambda *tensors: None, lambda *tensors: 1.0, lambda *tensors: tensors[0], lambda *tensors: tensors],
    [([1.0] * WIDTH, 0)] * 8,
    [(torch.ones(WIDTH), torch.tensor(9))] * 8,
    nn.CrossEntropyLoss(reduction="none"),
    nn.CrossEntropyLoss(weight=torch.ones(2)),
    nn.MSELoss(),
)
FIELDS = list(TrainSpec.__dataclass_fields__)
ODD = [made for made in PRODUCTIONS.values() if not made.changes]
"""Productions that make layers."""


def mutated(seed):
    """Returns the good spec with one to three faults."""
    dice, spec = random.Random(seed), good()
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.5 and isinstance(spec.layers, list):
            layers = [*spec.layers]
            at = dice.randint(0, len(layers))
            layers[at:at] = dice.choice(ODD).make()
            spec = replace(spec, layers=layers)
        else:
            spec = replace(spec, **{dice.choice(FIELDS): dice.choice(VALUES)})
    return spec


def outcome(folder: Path, seed: int) -> str:
    """Returns "works" or "refused" for a seed; anything else is a defect."""
    source = folder / f"own{seed}.py"
    source.write_text(f"{MODULE}def f():\n    return mutated({seed})\n")
    try:
        said = find(f"{source}:f").trial_errors()
    except SuiteError as error:
        said = [str(error)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if any("\n" in text or len(text) > 1000 for text in said):
        return f"not one sentence: {said}"
    return "refused" if said else "works"


@pytest.mark.parametrize("seed", range(40))
def test_a_spec_works_or_is_refused_in_one_sentence(tmp_path, seed):
    assert outcome(tmp_path, seed) in ("works", "refused")
