"""What is said when a run on Ray ends badly; the decisions alone, without a cluster."""

from pathlib import Path

import pytest

from experiments.cluster import Cluster
from experiments.registry import find
from experiments.scales import laptop
from launch.ray_train import check_room, first_cause
from launch.worker import Job
from suite.errors import NeighbourLostError, NumbersError, PlacementError, StallError, WorkerError
from suite.pipeline.recipe import Recipe

JOB = Job(Path("runs/x/1"), Path("text"), (66, 65), Recipe(), use_gpu=False, resume=False)
EXPERIMENT = laptop(find("t128_6b"), Cluster(2, 2**33, "cpu"))


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
        ({0: NeighbourLostError("lost 1"), 1: ActorDiedError("a\nb")}, WorkerError, "replica 0, stage 1: its process"),
        ({0: NeighbourLostError("lost 1"), 1: KeyError("x\ny")}, WorkerError, "stage 1: KeyError: .*resume RUN"),
        ({}, WorkerError, "many lines of Ray's own"),
    ],
)
def test_the_first_cause_is_one_sentence_and_collateral_is_not_it(failures, kind, message):
    cause = first_cause(WorkerGroupError(failures), JOB, EXPERIMENT)
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
