"""Seeded faults of a TrainSpec: it works, or one sentence says what is wrong.

python -m tests.experiments.custom.test_mutations 0 2000      so many by hand, with counts
"""

import collections
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.registry import find
from suite import TrainSpec
from suite.errors import SuiteError

WIDTH = 6
MODULE = "from tests.experiments.custom.test_mutations import mutated\n"


def good():
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
    data = TensorDataset(x, x[:, :4].argmax(1))
    return TrainSpec(layers=layers, loss=nn.CrossEntropyLoss(), train=data, valid=data, batch_size=8, steps=2, stages=2)


class Returns(nn.Module):
    """A layer that returns what a function makes of its input."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1))
        vars(self).update(attributes)

    def forward(self, *inputs):
        return self.function(inputs[0] * self.weight)


def failing(*arguments):
    raise KeyError("x\ny")


LAYERS = [
    lambda: Returns(lambda x: None),
    lambda: Returns(lambda x: [x, [x]]),
    lambda: Returns(lambda x: (x, 3)),
    lambda: Returns(lambda x: x.detach().numpy()),
    lambda: Returns(lambda x: {"x": x}),
    lambda: Returns(lambda x: x[:1]),
    lambda: Returns(lambda x: x.sum()),
    lambda: Returns(lambda x: x.double()),
    lambda: Returns(lambda x: x.half()),
    lambda: Returns(lambda x: x.long()),
    lambda: Returns(lambda x: x[x > 0]),
    lambda: Returns(lambda x: x.to_sparse()),
    lambda: Returns(lambda x: x.add_(1)),
    lambda: Returns(failing),
    lambda: Returns(lambda x: x * float(x.max())),
    lambda: Returns(lambda x: x.T),
    lambda: Returns(lambda x: x[:, :0]),
    lambda: Returns(lambda x: x / 0),
    lambda: Returns(lambda x: (x, x), stashes=("a",)),
    lambda: Returns(lambda x: x, pops=("a",)),
    lambda: Returns(lambda x: x, stashes=3),
    lambda: Returns(lambda x: x, pops=None),
    lambda: Returns(torch.fft.fft),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.LSTM(WIDTH, WIDTH),
    lambda: nn.Linear(3, 3),
    lambda: nn.Identity,
    lambda: nn.Linear(WIDTH, WIDTH).half(),
    lambda: nn.Linear(WIDTH, WIDTH, device="meta"),
    lambda: nn.LazyLinear(WIDTH),
    lambda: nn.Embedding(4, WIDTH, sparse=True),
    lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.Sequential(),
    lambda: "Linear",
]
VALUES = [
    None,
    0,
    -1,
    3,
    2.5,
    1e9,
    float("nan"),
    "",
    "x",
    [],
    (),
    {},
    {"a": 1},
    object(),
    failing,
    nn.Linear,
    nn.ReLU(),
    "é\0",
    torch.zeros(3),
    lambda *tensors: None,
    lambda *tensors: 1.0,
    lambda *tensors: tensors[0],
    lambda *tensors: tensors,
    range(5),
    [(1, 2)],
    [([1.0] * WIDTH, 0)] * 8,
    [(torch.ones(WIDTH), torch.tensor(9))] * 8,
    iter([1]),
    b"bytes",
    nn.CrossEntropyLoss(reduction="none"),
    nn.CrossEntropyLoss(weight=torch.ones(2)),
    nn.MSELoss(),
    True,
]
FIELDS = list(TrainSpec.__dataclass_fields__)


def mutated(seed):
    """Returns the good spec with one to three faults."""
    dice, spec = random.Random(seed), good()
    for _ in range(dice.randint(1, 3)):
        if dice.random() < 0.5 and isinstance(spec.layers, list):
            layers = [*spec.layers]
            layers.insert(dice.randint(0, len(layers)), dice.choice(LAYERS)())
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


@pytest.mark.parametrize("seed", range(60))
def test_a_spec_works_or_is_refused_in_one_sentence(tmp_path, seed):
    assert outcome(tmp_path, seed) in ("works", "refused")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        counts = collections.Counter()
        for seed in range(*map(int, sys.argv[1:])):
            found = outcome(Path(place), seed)
            counts[found.split(":")[0]] += 1
            if found not in ("works", "refused"):
                print(seed, found[:300])
        print(dict(counts))
