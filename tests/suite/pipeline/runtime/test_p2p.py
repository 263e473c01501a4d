"""Waits: the host waits for messages of the CPU with a timeout, on a GPU the stream does; errors say what was lost."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from suite.errors import PeerLostError
from suite.pipeline.runtime.p2p import MessageTimeout, wait

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Message(dist.Work):
    """Records the timeouts of its waits; ends with an error if it has one."""

    def __init__(self, error=None):
        super().__init__()
        self.error, self.timeouts = error, []

    def wait(self, *timeout):
        self.timeouts.append(timeout)
        if self.error is not None:
            raise self.error
        return True


def test_only_a_wait_of_the_host_has_a_time_out():
    """With one, c10d's WorkNCCL.wait blocks the host until the tensor is there; without, it makes the stream wait."""
    timeout, on_host, on_stream = MessageTimeout(5.0), Message(), Message()
    wait(on_host, timeout, "a tensor", CPU)
    wait(on_stream, timeout, "a tensor", GPU)
    assert on_host.timeouts == [(timedelta(seconds=5),)]
    assert on_stream.timeouts == [()]
    assert timeout.waiting_for == ""


def test_a_lost_message_is_reported_with_its_cause():
    error = RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(PeerLostError, match="lost the connection while waiting for a tensor") as caught:
        wait(Message(error), MessageTimeout(5.0), "a tensor", CPU)
    assert caught.value.__cause__ is error


def test_any_other_error_stays_what_it_is_and_is_not_its_own_cause():
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else") as caught:
        wait(Message(error), MessageTimeout(5.0), "a tensor", CPU)
    assert caught.value is error
    assert error.__cause__ is None
