"""What is said when a run on Ray ends badly; the decisions alone, without a cluster."""

import pytest

from launch.ray_train import check_room, first_cause
from suite.errors import (
    DiedError,
    NeighbourLostError,
    NumbersError,
    PlacementError,
    ProgramError,
    StallError,
    Where,
    WorkerError,
)

BUG = ProgramError("stage 1: KeyError", "KeyError", Where(0, 1))


class WorkerGroupError(Exception):
    """As Ray Train raises it: failures by rank."""

    def __init__(self, failures):
        super().__init__("many lines of Ray's own")
        self.worker_failures = failures


class ActorDiedError(Exception):
    """As Ray raises it for a killed process."""


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        ({0: NeighbourLostError("lost 1"), 1: NumbersError("not finite")}, NumbersError, "^not finite$"),
        ({0: StallError("waited"), 1: NeighbourLostError("lost 0")}, StallError, "^waited$"),
        ({0: NeighbourLostError("lost 1"), 1: ActorDiedError("a\nb")}, DiedError, "worker 1 .* its process ended"),
        ({0: StallError("waited"), 1: ActorDiedError("a\nb")}, DiedError, "worker 1 .* its process ended"),
        ({0: StallError("waited"), 1: BUG}, ProgramError, "^stage 1: KeyError$"),
        ({0: NeighbourLostError("lost 1"), 1: KeyError("x\ny")}, DiedError, "worker 1 .* KeyError: "),
        ({}, WorkerError, "many lines of Ray's own"),
    ],
)
def test_the_first_cause_is_one_sentence_and_collateral_is_not_it(failures, kind, message):
    cause = first_cause(WorkerGroupError(failures))
    assert type(cause) is kind
    with pytest.raises(kind, match=message):
        raise cause
    assert "\n" not in str(cause)


def test_too_few_devices_in_all_or_free_are_told_in_numbers():
    check_room("CPU", 2, {"CPU": 4.0}, {"CPU": 2.0})
    with pytest.raises(PlacementError, match="4 workers need 4 CPUs; the Ray cluster has 2, of which 2 are free"):
        check_room("CPU", 4, {"CPU": 2.0}, {"CPU": 2.0})
    with pytest.raises(PlacementError, match="has 8, of which 1 are free"):
        check_room("CPU", 4, {"CPU": 8.0}, {"CPU": 1.0})
    with pytest.raises(PlacementError, match="need 1 GPUs; the Ray cluster has 0"):
        check_room("GPU", 1, {"CPU": 8.0}, {"CPU": 8.0})


def test_a_node_that_was_taken_back_is_told_from_a_death():
    death = ActorDiedError("gone")
    death.preempted = True
    cause = first_cause(WorkerGroupError({0: NeighbourLostError("lost 1"), 1: death}))
    assert (type(cause), cause.rank, cause.kind) == (DiedError, 1, "preemption")
