"""Where the workers that measure links meet: a port that is held from its choice to its use."""

import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.backends.processes import run_processes
from launch.diagnostics.links import LinkActor

HOST = "127.0.0.1"


def test_the_port_is_held_until_the_workers_meet():
    worker = LinkActor()
    _, port = worker.ready(HOST, use_gpu=False)
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, port))


def meets(rank, world, rendezvous, folder, per_node):
    worker, note = LinkActor(), Path(folder) / "port"
    _, port = worker.ready(HOST, use_gpu=False)
    if rank == 0:
        note.with_suffix(".draft").write_text(str(port))
        note.with_suffix(".draft").rename(note)
    until = time.monotonic() + 60
    while not note.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    reduced, all_reduce = set(), dist.all_reduce

    def noting(values, *args, group=None, **options):
        reduced.add(tuple(dist.get_process_group_ranks(group)))
        return all_reduce(values, *args, group=group, **options)

    dist.all_reduce = noting
    return worker.measure(rank, world // per_node, per_node, HOST, int(note.read_text()), False), reduced


def test_workers_meet_in_the_first_ones_store(tmp_path):
    (first, _), (second, _) = run_processes(meets, 2, str(tmp_path), 1)
    assert first.pairs[0, 1].bytes_per_s > 0
    assert first.reduced.latency_s > 0
    assert second.pairs == {}


def test_each_device_of_a_node_meets_the_one_of_its_index_on_the_others(tmp_path):
    found, reduced = zip(*run_processes(meets, 6, str(tmp_path), 2), strict=True)
    assert reduced == 3 * ({(*range(6),), (0, 2, 4)}, {(*range(6),), (1, 3, 5)})
    assert [sorted(one.pairs) for one in found] == 2 * [[(0, 1), (0, 2)]] + 2 * [[(1, 2)]] + 2 * [[]]
    assert all(link.bytes_per_s > 0 for one in found for link in (*one.pairs.values(), one.reduced))
