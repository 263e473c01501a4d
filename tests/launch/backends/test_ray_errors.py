"""The root cause of a failed attempt on Ray, without a cluster."""

import pytest

from launch.backends.ray_errors import root_cause
from suite.errors import DiedError, NeighbourLostError, NumbersError, ProgramError, StallError, Where, WorkerError

BUG = ProgramError("stage 1: KeyError", "KeyError", Where(0, 1))


class WorkerGroupError(Exception):
    """Like Ray Train's: has the failures by rank."""

    def __init__(self, failures):
        super().__init__("many lines of Ray's own")
        self.worker_failures = failures


class ActorDiedError(Exception):
    """Like the one that Ray raises for a killed process."""


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
def test_the_root_cause_is_one_sentence_and_not_a_consequence(failures, kind, message):
    cause = root_cause(WorkerGroupError(failures))
    assert type(cause) is kind
    with pytest.raises(kind, match=message):
        raise cause
    assert "\n" not in str(cause)


def test_a_preempted_node_is_distinguished_from_a_death():
    death = ActorDiedError("gone")
    death.preempted = True
    cause = root_cause(WorkerGroupError({0: NeighbourLostError("lost 1"), 1: death}))
    assert (type(cause), cause.rank, cause.kind) == (DiedError, 1, "preemption")
