"""The connection to Ray: how long it takes to check silent nodes."""

import socket
import time

import pytest

from launch.backends.ray_connection import ANSWER_S, _answers


@pytest.fixture
def silent():
    """Addresses of nodes that neither accept nor refuse a connection, like machines that hang."""
    opened = []

    def node():
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        opened.append(server)
        for _ in range(2):  # more than its queue holds: it drops whatever comes next
            caller = socket.socket()
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
            opened.append(caller)
        return server.getsockname()

    yield node
    for one in opened:
        one.close()


@pytest.mark.slow
def test_many_silent_nodes_take_no_longer_than_one(silent):
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [silent() for _ in range(8)] + [server.getsockname()]
        begin = time.monotonic()
        found = _answers([{"NodeManagerAddress": host, "NodeManagerPort": port} for host, port in addresses])
        seconds = time.monotonic() - begin
    assert found == [False] * 8 + [True]
    assert ANSWER_S <= seconds < 3 * ANSWER_S
