"""Ten and twenty steps of training: the same whatever K, close at any R, and the same when interrupted."""

import shutil

import numpy as np
import pytest
import torch

from suite.errors import CheckpointError, NonFiniteError
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.freezing import FREEZES
from tests.suite.training.work import train_in_processes

HALF, WHOLE = 10, 20
"""Steps until a checkpoint, and until the end."""


def trained(stages, replicas=1, until=HALF, **options):
    return train_in_processes(stages, replicas, until, **{"every": HALF, **options})


def assert_same(one, other, tolerance=0.0):
    losses, weights = one
    other_losses, other_weights = other
    assert len(losses) == len(other_losses)
    assert weights.keys() == other_weights.keys()
    np.testing.assert_allclose(losses, other_losses, rtol=tolerance, atol=0)
    for key in weights:
        np.testing.assert_allclose(weights[key], other_weights[key], rtol=0, atol=tolerance, err_msg=str(key))


@pytest.fixture(scope="module")
def alone():
    return trained(1)


def test_steps_are_bit_equal_at_every_k(alone, half_way):
    assert_same(alone, half_way[1])
    assert_same(alone, trained(4))
    losses, _ = alone
    assert losses[-1][0] < 0.9 * losses[0][0]  # it learns
    assert max(norm for _, norm in losses) > 0.2  # the clip bound was reached


def test_replicas_train_alike_also_one_without_micro_batches(alone):
    assert_same(alone, trained(2, 3), tolerance=1e-6)  # three share 4 micro-batches: 2, 2 and none


@pytest.fixture(scope="module")
def whole():
    return trained(2, until=WHOLE)


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """Returns (folder with the checkpoint of step HALF, what the first steps gave)."""
    folder = tmp_path_factory.mktemp("half")
    return folder, trained(2, folder=str(folder))


@pytest.fixture
def checkpoints(half_way, tmp_path):
    return str(shutil.copytree(half_way[0], tmp_path / "checkpoints"))


@pytest.mark.parametrize(("stages", "replicas"), [(3, 1), (2, 2)])
def test_a_checkpoint_resumes_at_another_k_and_r(whole, checkpoints, stages, replicas):
    losses, weights = trained(stages, replicas, until=WHOLE, folder=checkpoints, resume=True)
    assert_same((whole[0][HALF:], whole[1]), (losses, weights), tolerance=1e-6)


def test_another_optimizers_state_is_refused(checkpoints):
    with pytest.raises(CheckpointError, match=r"layer 0, table is .*exp_avg.* adafactor needs .*row_var"):
        trained(1, until=WHOLE, folder=checkpoints, resume=True, optimizer="adafactor")


def test_two_replicas_train_alike_and_their_sharded_checkpoint_resumes_unsharded(alone, whole, tmp_path):
    assert_same(alone, trained(1, replicas=2, folder=str(tmp_path)), tolerance=1e-6)
    losses, weights = trained(2, until=WHOLE, folder=str(tmp_path), resume=True)
    assert_same((whole[0][HALF:], whole[1]), (losses, weights), tolerance=1e-6)


@pytest.mark.slow
def test_fp64_trains_alike_with_replicas_and_resumes(tmp_path):
    fp64 = {"dtype": torch.float64}
    whole = trained(1, until=6, **fp64)
    assert_same(whole, trained(2, 2, until=6, **fp64), tolerance=1e-11)
    first, _ = trained(1, 2, until=3, folder=str(tmp_path), **fp64)
    rest, weights = trained(2, until=6, folder=str(tmp_path), resume=True, **fp64)
    assert_same(whole, (first + rest, weights), tolerance=1e-11)


def test_a_step_with_infinite_numbers_changes_nothing_anywhere(alone):
    losses, weights = trained(2, until=3, spoil=(2,))
    before, unspoiled = trained(2, until=2)
    assert [np.isfinite(norm) for _, norm in losses] == [True, True, False]
    for key in weights:
        assert np.array_equal(weights[key], unspoiled[key]), key
    assert losses[:2] == before


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "layer 5: .* or the loss behind it"),
        (
            {
                "poison": ("gradient", 4, 2), "schedule_config": ScheduleConfig("zero_bubble", (UNLIMITED,)),
                "frozen": FREEZES["the layers of a middle stage"],
            },
            "micro-batch 2, layer 4: .*, gradient of input 0, in action I2",
        ),
    ],
)  # fmt: skip
def test_too_many_bad_steps_stop_all_workers_and_name_where_the_numbers_went_bad(options, place):
    """Also behind frozen layers, with a backward in two parts."""
    with pytest.raises(
        NonFiniteError, match=rf"3 steps in a row .* the first non-finite number was at replica 0, stage 1, .*{place}"
    ):
        trained(2, spoil=(2, 3, 4), **options)


def test_bad_numbers_that_do_not_come_again_are_told_as_a_devices():
    with pytest.raises(NonFiniteError, match=r"in a rerun, every output.* non-finite gradients: 0, 1, 2, 3, 4, 5\)"):
        trained(2, spoil=(2, 3, 4), once=True)
