"""A checkpoint of any K, R, schedule and ZeRO stage, read at any other: the same state, and the same losses after."""

import shutil
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.training import work
from tests.suite.training.checkpoint.fuzz import files_of

STEPS = 20
RECIPES = {
    "fill_drain": ScheduleConfig(),
    "1f1b": ScheduleConfig("1f1b"),
    "interleaved": ScheduleConfig("interleaved", (UNLIMITED,), 2),
    "zero_bubble": ScheduleConfig("zero_bubble", (UNLIMITED,)),
}


def train(stages, replicas=1, schedule="fill_drain", until=STEPS, again=None, **options):
    """Returns (losses, weights); from step 20 on where there is something to be resumed."""
    resume = again is not None
    return work.train_in_processes(
        stages, replicas, until, schedule_config=RECIPES[schedule], resume=resume, again=again, **options
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function from a layout to the folder of its checkpoint of step 20."""

    @cache
    def folder_of(*layout, optimizer):
        folder = tmp_path_factory.mktemp("saved")
        train(*layout, folder=str(folder), optimizer=optimizer)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def undisturbed():
    """Returns a function to the losses of steps 21 to 40 of a run that was never stopped."""
    return cache(lambda optimizer: train(1, until=2 * STEPS, optimizer=optimizer)[0][STEPS:])


@pytest.fixture
def assert_converts(saved, undisturbed, tmp_path):
    def resume(there, here, optimizer="adamw"):
        """Resumes at ``here`` what was saved at ``there``: the state read is the state written, to the bit."""
        folder = shutil.copytree(saved(*there, optimizer=optimizer), tmp_path / "copy")  # the run adds its own to it
        again = tmp_path / "again"
        resumed, _ = train(*here, until=2 * STEPS, folder=str(folder), again=str(again), optimizer=optimizer)
        written, read = (files_of(place / f"{STEPS:08d}") for place in (folder, again))
        for layer, tensors in written.items():
            assert tensors.keys() == read[layer].keys()
            for name, value in tensors.items():
                assert torch.equal(value, read[layer][name]), (layer, name)
        assert len(resumed) == STEPS
        np.testing.assert_allclose(resumed, undisturbed(optimizer), rtol=1e-6, atol=0)

    return resume


@pytest.mark.parametrize(("there", "here"), list(product((1, 2, 3, 4), repeat=2)))
def test_from_every_k_to_every_k(assert_converts, there, here):
    assert_converts((there,), (here,))


@pytest.mark.parametrize(
    ("there", "here"), [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((2, 1), (2, 2)), ((2, 2), (2, 1)), ((3, 1), (1, 2)),
                        ((1, 2), (2, 2)), ((2, 2), (4, 1))]
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_from_one_replica_to_two_and_back_with_zero_and_without(assert_converts, there, here, optimizer):
    """AdamW's state is sharded over replicas (ZeRO-1), Adafactor's never."""
    assert_converts(there, here, optimizer=optimizer)


@pytest.mark.parametrize(
    ("there", "here"), [("fill_drain", "interleaved"), ("interleaved", "zero_bubble"), ("zero_bubble", "1f1b"),
                        ("1f1b", "fill_drain"), ("zero_bubble", "interleaved")]
)  # fmt: skip
def test_from_one_schedule_to_another(assert_converts, there, here):
    assert_converts((2, 1, there), (2, 1, here))
