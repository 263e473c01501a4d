"""Where the workers that measure links meet: a port that is held from its choice to its use."""

import socket
import time
from pathlib import Path

import pytest

from launch.backends.processes import run_processes
from launch.diagnostics.links import LinkActor

HOST = "127.0.0.1"


def test_the_port_is_held_until_the_workers_meet():
    worker = LinkActor()
    port = worker.ready(HOST)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, port))


def meets(rank, world, rendezvous, folder):
    worker, note = LinkActor(), Path(folder) / "port"
    port = worker.ready(HOST)
    if rank == 0:
        note.with_suffix(".draft").write_text(str(port))
        note.with_suffix(".draft").rename(note)
    until = time.monotonic() + 60
    while not note.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    return worker.measure(rank, world, HOST, int(note.read_text()), False)


def test_workers_meet_in_the_first_ones_store(tmp_path):
    first, second = run_processes(meets, 2, str(tmp_path))
    assert first.pairs[0, 1].bytes_per_s > 0
    assert first.reduced.latency_s > 0
    assert second.pairs == {}
