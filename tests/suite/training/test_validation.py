"""Validation during training: the same bits of losses and weights as without, the same figures at every K and R."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from launch.backends.processes import run_processes
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.schedule.config import ScheduleConfig
from suite.settings import TrainSettings
from suite.training import checkpoint
from suite.training.checkpoint import writing
from suite.training.loop import MIN_MESSAGE_TIMEOUT_S
from suite.training.validation import Criterion, Figures, HeldOut, Validation, ValidationState, notes_of, state_of
from tests.marks import slow_but_for
from tests.suite.pipeline.build import join, mini_batch
from tests.suite.pipeline.toy import WIDTH, Block, toy_batch, toy_layers
from tests.suite.training.work import trained

STEPS, EVERY = 6, 2


class NormBlock(Block):
    """Normalizes, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(WIDTH)

    def reset_parameters(self):
        super().reset_parameters()
        self.norm.reset_parameters()

    def forward(self, x, *others):
        return super().forward(self.norm(x.mT.unsqueeze(-1)).squeeze(-1).mT, *others)


def norm_layers():
    """Ties, dropout and running statistics."""
    found = toy_layers()
    with torch.device("meta"):
        found[1], found[4] = NormBlock(), NormBlock()
    return found


SCHEDULES = ("except_last", ScheduleConfig("zero_bubble", (4,)))


class Metrics:
    """A tracker that remembers."""

    def __init__(self):
        self.steps, self.validations = [], []

    def log(self, step, values):
        if "train/loss" in values:
            self.steps.append((values["train/loss"], values["train/grad_norm"]))
        else:
            self.validations.append((step, {name: v for name, v in values.items() if name != "valid/seconds"}))

    def finish(self, summary):
        pass


def held_out(coord):
    """Three mini-batches of other sizes, in two groups."""
    batches = []
    for at, examples in enumerate((5, 4, 3)):
        batch = mini_batch(*toy_batch(examples, seed=900 + at), 3)
        groups = [("even" if i % 2 == 0 else "odd", float((t[0] != 0).sum())) for i, t in enumerate(batch.targets)]
        batches.append(dataclasses.replace(batch, groups=groups))
    needed = coord.is_first or coord.has_loss
    return HeldOut(batches if needed else [None] * len(batches), ("even", "odd"))


def runs(rank, world, rendezvous, stages, replicas):
    """Returns, by schedule, and whether it validates: losses, validations, values of this worker's layers, state."""
    join(rank, world, rendezvous)
    coord = RankCoord(rank, stages, replicas)
    return {(str(one), validates): _run(coord, one, validates) for one in SCHEDULES for validates in (False, True)}


def _run(coord, schedule, validates):
    metrics, state = Metrics(), ValidationState() if validates else None
    settings = TrainSettings(steps=STEPS, validate_every=EVERY)

    def validation(executor):
        return Validation(executor, lambda: held_out(coord), ("nll",), Criterion("nll"), settings, state)

    others = {"validation": validation} if validates else {}
    where = coord.rank, coord.stages, coord.replicas
    _, values = trained(*where, STEPS, schedule_config=schedule, layers=norm_layers(), tracker=metrics, **others)
    return metrics.steps, metrics.validations, values, state


@pytest.fixture(scope="module")
def alone():
    return run_processes(runs, 1, 1, 1)


@pytest.mark.parametrize(("stages", "replicas"), slow_but_for([(1, 1)], [(1, 1), (4, 1), (2, 2)]))
def test_a_run_with_validation_has_the_bits_of_one_without(alone, stages, replicas):
    found = alone if stages == replicas == 1 else run_processes(runs, stages * replicas, stages, replicas)
    for schedule in map(str, SCHEDULES):
        for worker in found:
            steps, validations, values, _ = worker[schedule, False]
            own_steps, own_validations, own_values, state = worker[schedule, True]
            assert own_steps == steps
            assert validations == []
            assert [step for step, _ in own_validations] == ([2, 4, 6] if own_steps else [])
            assert state == found[0][schedule, True][3]  # all workers decide alike
            assert values.keys() == own_values.keys()
            for key, value in values.items():
                assert np.array_equal(own_values[key], value), (schedule, key)
        figures = next(worker[schedule, True][1] for worker in found if worker[schedule, True][1])
        expected = alone[0][schedule, True][1]
        if replicas == 1:  # more replicas add their gradients in another order
            assert figures == expected
        for (_, own), (_, other) in zip(figures, expected, strict=True):
            assert own == pytest.approx(other, rel=1e-5)


def test_the_groups_add_up_to_the_mean_by_their_weights(alone):
    weights = {"even": 0.0, "odd": 0.0}
    for batch in held_out(RankCoord(0, 1, 1)).batches:
        for name, weight in batch.groups:
            weights[name] += weight
    for key, (_, validations, _, _) in alone[0].items():
        for _, values in validations:
            mean = sum(values[f"valid/nll/{name}"] * weight for name, weight in weights.items()) / sum(weights.values())
            assert values["valid/nll"] == pytest.approx(mean, rel=1e-12), key
            assert values["valid/nll/even"] != values["valid/nll/odd"]


class Planned(Validation):
    """Validations with the given values."""

    def __init__(self, values, state=None, criterion=None, **settings):
        settings = TrainSettings(**{"steps": 100, "validate_every": 10, **settings})
        super().__init__(None, None, ("nll",), criterion or Criterion("nll"), settings, state or ValidationState())
        self._values = values

    def figures(self, step):
        return Figures(0.0, (self._values[step // 10 - 1],), {}, {})


def decisions(validation, start=0):
    """Returns the best steps as they came, the step at which the run ends, and why."""
    best = []
    for step in range(start + 10, validation._settings.steps + 1, 10):
        if validation.validate(step)[1]:
            best.append(step)
        if reason := validation.stopped_early(step):
            return best, step, reason
    return best, step, ""


def test_the_run_ends_after_as_many_validations_without_improvement_as_patience_says():
    values = [5.0, 4.0, math.nan, 4.0, 3.9, 3.9, 4.2, 3.8, 3.7, 3.6]
    assert decisions(Planned(values, patience=2)) == (
        [10, 20], 40, "stopped early after 40 of 100 steps: 2 validations in a row did not improve; the best was nll "
        "4.0000 at step 20",
    )  # fmt: skip
    assert decisions(Planned(values, patience=3)) == ([10, 20, 50, 80, 90, 100], 100, "")
    assert decisions(Planned(values)) == ([10, 20, 50, 80, 90, 100], 100, "")
    rising = Planned([0.1, 0.3, 0.2, 0.3], criterion=Criterion("accuracy", True), patience=2)
    assert decisions(rising)[:2] == ([10, 20], 40)
    assert decisions(Planned([5.0, 6.0], steps=20, patience=1)) == ([10], 20, "")  # the last validation stops nothing
    best, end, reason = decisions(Planned([math.nan, math.inf], patience=1))
    assert (best, end) == ([], 10)
    assert reason.endswith("the last validation did not improve; none was finite")


def best_between_saves(rank, world, rendezvous, folder):
    join(rank, world, rendezvous)
    planned = Planned([5.0, 4.0], steps=25)
    trained(0, 1, 1, 25, folder, every=1000, tracker=Metrics(), validation=lambda executor: planned)


def test_the_best_weights_are_saved_in_their_own_step(tmp_path):
    run_processes(best_between_saves, 1, str(tmp_path))
    assert sorted(int(path.parent.name) for path in tmp_path.glob("*/manifest.json")) == [20, 25]


def best_at_the_end(rank, world, rendezvous, folder):
    """The storage does not answer when the last save begins; the next attempt succeeds."""
    join(rank, world, rendezvous)
    planned, fails = Planned([5.0, 4.0], steps=20), [None, OSError("stale"), None]

    def check_owner(storage, owner):
        if error := fails.pop(0):
            raise error

    writing.check_owner = check_owner
    checkpoint.Saver = partial(checkpoint.Saver, on_failure=planned.forget)
    trained(0, 1, 1, 20, folder, every=1000, tracker=Metrics(), validation=lambda executor: planned)
    newest = checkpoint.list_checkpoints(folder, print)[0]
    return newest.step, newest.best, planned.state


def test_the_best_weights_of_the_last_step_keep_their_value_when_their_save_is_repeated(tmp_path):
    assert run_processes(best_at_the_end, 1, str(tmp_path)) == [(20, True, ValidationState(4.0, 20, 0))]


def limits_of_trackers(rank, world, rendezvous):
    """Returns the seconds that a tracker may take, after steps and after a validation."""
    join(rank, world, rendezvous)
    limits, tracker = [], Metrics()

    def watch(executor):
        tracker.log = lambda step, values: limits.append(executor.status.current_timeout_s)
        return Planned([5.0], steps=10)

    trained(0, 1, 1, 10, tracker=tracker, validation=watch)
    return limits


def test_a_function_of_the_user_after_a_step_has_a_minute():
    """The others wait as long for its stage's message."""
    (limits,) = run_processes(limits_of_trackers, 1)
    assert limits == [MIN_MESSAGE_TIMEOUT_S] * 11


def test_a_best_checkpoint_that_could_not_be_written_is_not_the_best():
    validation = Planned([5.0, 4.0, 3.0, 3.5, 3.8], patience=3)
    assert [validation.validate(step)[1] for step in (10, 20, 30)] == [True, True, True]
    validation.forget(20)  # known only after the next validation
    assert validation.state == ValidationState(3.0, 30, 0)
    assert not validation.validate(40)[1]
    validation.forget(30)
    assert validation.state == ValidationState(5.0, 10, 1)
    assert validation.validate(50)[1]  # better than any that was saved
    validation.forget(50)
    validation.forget(10)
    assert validation.state == ValidationState(None, None, 0)


@pytest.mark.parametrize("cut", [10, 20, 30, 40])
def test_a_run_resumed_from_its_notes_decides_alike(cut):
    values = [5.0, 4.0, 4.5, 3.9, 3.95, 4.0]
    best, end, reason = decisions(Planned(values, patience=2))
    first = Planned(values, patience=2)
    before = [step for step in range(10, cut + 1, 10) if first.validate(step)[1]]
    later = decisions(Planned(values, state_of(notes_of(first)), patience=2), cut)
    assert (before + later[0], *later[1:]) == (best, end, reason)
    assert (best, end) == ([10, 20, 40], 60)


def test_without_an_interval_only_the_end_counts_and_nothing_is_the_best():
    last = Planned([5.0] * 10, validate_every=None)
    assert [step for step in range(1, 101) if last.is_due(step)] == [100]
    assert last.validate(100)[1] is False
    assert notes_of(last) == {}
