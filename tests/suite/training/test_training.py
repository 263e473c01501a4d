"""Twenty and forty steps of training: the same whatever K, close at any R, and the same when interrupted."""

import shutil

import numpy as np
import pytest
import torch

from launch.backends.processes import run_processes
from suite.errors import CheckpointError, NonFiniteError
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from tests.suite.pipeline.build import join
from tests.suite.training import work
from tests.suite.training.work import interrupted, merge, run


def trained(stages, replicas=1, until=20, **options):
    order = ("folder", "resume", "optimizer", "spoil", "total", "poison", "once", "schedule_config")
    defaults = dict(zip(order, (None, False, "adamw", (), 4, None, False, "except_last"), strict=True))
    values = [{**defaults, **options}[name] for name in order]
    return merge(run_processes(run, stages * replicas, stages, replicas, until, *values))


def assert_same(one, other, tolerance=0.0):
    losses, weights = one
    other_losses, other_weights = other
    assert len(losses) == len(other_losses)
    assert weights.keys() == other_weights.keys()
    if tolerance == 0:
        assert losses == other_losses
        for key in weights:
            assert np.array_equal(weights[key], other_weights[key]), key
    else:
        np.testing.assert_allclose(losses, other_losses, rtol=tolerance, atol=0)
        for key in weights:
            np.testing.assert_allclose(weights[key], other_weights[key], rtol=0, atol=tolerance, err_msg=str(key))


@pytest.fixture(scope="module")
def alone():
    return trained(1)


@pytest.mark.parametrize("stages", [2, 4])
def test_twenty_steps_are_bit_equal_at_every_k(alone, stages):
    assert_same(alone, trained(stages))
    losses, _ = alone
    assert losses[-1][0] < 0.9 * losses[0][0]  # it learns
    assert max(norm for _, norm in losses) > 0.2  # the clip bound was reached


@pytest.mark.parametrize("stages", [1, 2])
def test_two_replicas_train_alike(alone, stages):
    assert_same(alone, trained(stages, replicas=2), tolerance=1e-6)


def test_a_replica_without_micro_batches_changes_nothing(alone):
    assert_same(alone, trained(2, replicas=3), tolerance=1e-6)  # 4 micro-batches: 2, 2 and none


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "rmsprop", "sgd"])
def test_tied_copies_stay_equal_over_three_replicas(optimizer):
    losses, weights = trained(1, replicas=3, until=40, total=6, optimizer=optimizer)
    assert len(losses) == 40
    assert np.array_equal(weights[0, "table"], weights[3, "table"])


@pytest.fixture(scope="module")
def whole():
    return trained(2, until=40)


@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """Returns (folder with the checkpoint of step 20, what the first 20 steps gave)."""
    folder = tmp_path_factory.mktemp("half")
    return folder, trained(2, until=20, folder=str(folder))


@pytest.fixture
def checkpoints(half_way, tmp_path):
    return str(shutil.copytree(half_way[0], tmp_path / "checkpoints"))


def test_resumed_steps_are_those_of_an_undisturbed_run(whole, half_way, checkpoints):
    first_losses, _ = half_way[1]
    resumed_losses, weights = trained(2, until=40, folder=checkpoints, resume=True)
    assert_same(whole, (first_losses + resumed_losses, weights))


@pytest.mark.slow
def test_so_are_those_of_other_schedules_with_sharded_state(tmp_path):
    schedule_configs = ScheduleConfig("interleaved", (UNLIMITED,), 2), ScheduleConfig("zero_bubble", (UNLIMITED,))
    found = run_processes(interrupted, 4, 2, 2, str(tmp_path), schedule_configs)
    for pairs in zip(*found, strict=True):
        whole, resumed = (merge(kind) for kind in zip(*pairs, strict=True))
        assert len(whole[0]) == 8
        assert_same(whole, resumed)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_a_checkpoint_resumes_at_another_k_and_r(whole, checkpoints, stages, replicas):
    losses, weights = trained(stages, replicas, until=40, folder=checkpoints, resume=True)
    assert_same((whole[0][20:], whole[1]), (losses, weights), tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adafactor", "sgd"])
def test_other_optimizers_resume(tmp_path, optimizer):
    whole = trained(2, until=40, optimizer=optimizer)
    first, _ = trained(2, until=20, folder=str(tmp_path), optimizer=optimizer)
    resumed, weights = trained(2, until=40, folder=str(tmp_path), resume=True, optimizer=optimizer)
    assert_same(whole, (first + resumed, weights))


def test_another_optimizers_state_is_refused(checkpoints):
    with pytest.raises(CheckpointError, match=r"layer 0, table is .*exp_avg.* adafactor needs .*row_var"):
        trained(1, until=40, folder=checkpoints, resume=True, optimizer="adafactor")


def test_a_sharded_checkpoint_resumes_unsharded(whole, tmp_path):
    trained(1, replicas=2, until=20, folder=str(tmp_path))
    losses, weights = trained(2, until=40, folder=str(tmp_path), resume=True)
    assert_same((whole[0][20:], whole[1]), (losses, weights), tolerance=1e-6)


@pytest.mark.slow
def test_rmsprop_with_replicas_trains_alike_and_is_resumed_without(tmp_path):
    """Its momentum draws rounding out tenfold, so few steps are compared with those of other replicas."""
    assert_same(trained(2, until=5, optimizer="rmsprop"), trained(1, 2, until=5, optimizer="rmsprop"), tolerance=1e-6)
    losses, weights = trained(1, replicas=2, until=22, optimizer="rmsprop")
    trained(1, replicas=2, until=20, folder=str(tmp_path / "20"), optimizer="rmsprop")
    for stages, replicas in ((2, 1), (1, 2)):
        own = shutil.copytree(tmp_path / "20", tmp_path / f"{stages}{replicas}")
        resumed = trained(stages, replicas, until=22, folder=str(own), resume=True, optimizer="rmsprop")
        assert_same((losses[20:], weights), resumed, tolerance=1e-6)


def test_adafactor_is_bit_equal_over_k_and_trains_alike_with_replicas():
    alone = trained(1, optimizer="adafactor")
    assert_same(alone, trained(2, optimizer="adafactor"))
    assert_same(alone, trained(1, replicas=2, optimizer="adafactor"), tolerance=1e-6)


def in_fp64(rank, world, rendezvous, stages, replicas, until, folder=None, resume=False):
    join(rank, world, rendezvous)
    return work.trained(rank, stages, replicas, until, folder, resume, dtype=torch.float64)


@pytest.mark.slow
def test_fp64_trains_alike_with_replicas_and_resumes(tmp_path):
    whole = merge(run_processes(in_fp64, 1, 1, 1, 6))
    assert_same(whole, merge(run_processes(in_fp64, 4, 2, 2, 6)), tolerance=1e-11)
    first, _ = merge(run_processes(in_fp64, 2, 1, 2, 3, str(tmp_path)))
    rest, weights = merge(run_processes(in_fp64, 2, 2, 1, 6, str(tmp_path), True))
    assert_same(whole, (first + rest, weights), tolerance=1e-11)


def test_a_step_with_infinite_numbers_changes_nothing_anywhere(alone):
    losses, weights = trained(2, until=3, spoil=(2,))
    before, unspoiled = trained(2, until=2)
    assert [np.isfinite(norm) for _, norm in losses] == [True, True, False]
    for key in weights:
        assert np.array_equal(weights[key], unspoiled[key]), key
    assert losses[:2] == before


@pytest.mark.parametrize(
    ("poison", "schedule_config", "place"),
    [
        (None, "except_last", "layer 5: .* or the loss behind it"),
        (
            ("gradient", 4, 2),
            ScheduleConfig("zero_bubble", (UNLIMITED,)),
            "micro-batch 2, layer 4: .*, gradient of input 0, in action I2",
        ),
    ],
)
def test_too_many_bad_steps_stop_all_workers_and_name_where_the_numbers_went_bad(poison, schedule_config, place):
    with pytest.raises(
        NonFiniteError, match=rf"3 steps in a row .* the first non-finite number was at replica 0, stage 1, .*{place}"
    ):
        trained(2, until=20, spoil=(2, 3, 4), poison=poison, schedule_config=schedule_config)


def test_bad_numbers_that_do_not_come_again_are_told_as_a_devices():
    with pytest.raises(NonFiniteError, match=r"in a rerun, every output.* non-finite gradients: 0, 1, 2, 3, 4, 5\)"):
        trained(2, until=20, spoil=(2, 3, 4), once=True)
