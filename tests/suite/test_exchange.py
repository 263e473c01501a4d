"""Values that all workers exchange: they arrive as sent, and nothing that arrives is executed."""

import math
import pickle

import torch
import torch.distributed as dist

from launch.backends.processes import run_processes
from launch.worker.distributed import init_process_group
from suite import exchange

VALUES = [
    *("", "Ωβ\0\n", 'a"b', None, True, 7, 2**60, 0.1, -1e-300, math.inf, []),
    *([["00000004", {"a": [1, 2]}, None]], "x" * 70_000),
]


def _exchange(rank, world, rendezvous):
    init_process_group(rank, world, rendezvous)
    gathered = [exchange.all_gather([rank, value] if rank else value) for value in VALUES]
    sent = [[exchange.broadcast(value if rank == src else rank, src) for value in VALUES] for src in range(world)]
    refused = ""
    if rank == 0:
        pickled = torch.tensor(list(pickle.dumps(ValueError)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([pickled.numel()]), 0)
        dist.broadcast(pickled, 0)
    else:
        try:
            exchange.broadcast(None)
        except ValueError as error:
            refused = type(error).__name__
    return gathered, sent, refused


def test_every_worker_gets_each_value_as_it_was_sent_and_loads_no_pickle():
    answers = run_processes(_exchange, 3)
    for gathered, sent, _ in answers:
        assert gathered == [[value, [1, value], [2, value]] for value in VALUES]
        assert sent == [VALUES] * 3
    assert [refused for *_, refused in answers] == ["", "UnicodeDecodeError", "UnicodeDecodeError"]
