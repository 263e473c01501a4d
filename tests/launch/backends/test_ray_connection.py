"""The connection to Ray: silent nodes."""

import threading
from types import SimpleNamespace

from launch.backends import ray_connection


def test_all_nodes_are_asked_at_once_so_that_many_silent_ones_take_no_longer_than_one(monkeypatch):
    """Each call waits until all nodes have been called."""
    all_are_asked = threading.Barrier(9)

    def connect(address, timeout):
        assert timeout == ray_connection.ANSWER_S
        all_are_asked.wait(20)
        if address[1] != 8:
            raise TimeoutError
        return SimpleNamespace(close=bool)

    monkeypatch.setattr(ray_connection.socket, "create_connection", connect)
    nodes = [{"NodeManagerAddress": "host", "NodeManagerPort": port} for port in range(9)]
    assert ray_connection._answers(nodes) == [False] * 8 + [True]
