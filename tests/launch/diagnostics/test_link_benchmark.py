"""Where the workers that measure links meet: a port that is held from its choice to its use."""

import socket
import time
from pathlib import Path

import pytest

from launch.backends.processes import run_processes
from launch.diagnostics.links import LinkActor, Place

HOST = "127.0.0.1"


def test_the_port_is_held_until_the_workers_meet():
    worker = LinkActor()
    _, port = worker.ready(HOST)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, port))


def meets(rank, world, rendezvous, folder, per_node):
    worker, note = LinkActor(), Path(folder) / "port"
    _, port = worker.ready(HOST)
    if rank == 0:
        note.with_suffix(".draft").write_text(str(port))
        note.with_suffix(".draft").rename(note)
    until = time.monotonic() + 60
    while not note.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    place = Place(*divmod(rank, per_node), world // per_node, per_node)
    return worker.measure(place, HOST, int(note.read_text()), False)


def test_workers_meet_in_the_first_ones_store(tmp_path):
    first, second = run_processes(meets, 2, str(tmp_path), 1)
    assert first.pairs[0, 1].bytes_per_s > 0
    assert first.reduced.latency_s > 0
    assert second.pairs == {}


def test_each_device_of_a_node_meets_the_one_of_its_index_on_the_others(tmp_path):
    found = run_processes(meets, 6, str(tmp_path), 2)
    assert [sorted(one.pairs) for one in found] == 2 * [[(0, 1), (0, 2)]] + 2 * [[(1, 2)]] + 2 * [[]]
    assert all(link.bytes_per_s > 0 for one in found for link in (*one.pairs.values(), one.reduced))
