"""What grows with the number of workers, and how fast."""

import re

from launch.supervision.watchdog import FIRST_HEARTBEAT_S
from tests.scale.joining import joined
from tests.scale.starts import Machines, simulate


def test_what_a_worker_asks_of_the_store_grows_with_k_and_r_and_not_with_their_product():
    """16 workers; to all others it would make 2 calls and have a connection each."""
    calls, _, descriptors = joined(2, 8)
    few, _, fewer = joined(2, 2)
    assert calls - few <= 6 * 3 + 4  # of the replicas of its stage, and of the group of all at its messages
    assert descriptors - fewer <= 6 + 5


def test_a_start_whose_last_node_reads_a_cold_disk_is_no_stall():
    start = simulate(64, Machines([5.0]), seed=0)
    assert start.verdict is None
    assert start.first_step_s > FIRST_HEARTBEAT_S


def test_a_worker_that_never_comes_is_named_300_seconds_after_the_last_other_one():
    start = simulate(8, Machines([5.0], cold=1, cold_by=1e3), seed=0)
    assert start.verdict is not None
    assert re.search(r"no heartbeat in 30[0-2] s since the last other worker came", start.verdict.message)
