"""Random numbers that do not depend on K, on remat, or on the worker.

Before each layer's forward every generator that a layer may draw from is set to a seed made of (``train.seed``, step,
replica, micro-batch, layer); a recompute sets the same seed and draws the same dropout masks. Replica and micro-batch
are one number, the index of the micro-batch in the mini-batch: of R x M, replica r's i-th has r*M + i. So two replicas
of M micro-batches draw the same numbers as one replica of 2M.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from suite.device import fork_rng, generator_of

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Returns a 63-bit seed that depends on every bit of every value and on their order (splitmix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def layer_seed(train_seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Returns the seed of one layer's forward. ``micro_batch`` counts over the whole mini-batch, all replicas."""
    return mix(1, train_seed, step, micro_batch, layer)


def initial_seed(train_seed: int, layer: int) -> int:
    return mix(2, train_seed, layer)


def set_seed(seed: int, device: torch.device) -> None:
    """Seeds every generator from which a layer on ``device`` may draw: torch's of the device and of the host, Python's
    ``random`` and numpy's. ``torch.manual_seed`` would seed all devices for each layer.

    The last two take 5 us (measured).
    """
    for generator in {torch.default_generator, generator_of(device)}:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which torch, numpy and ``random`` start from a seed; at its end all are as before."""
    before = random.getstate(), np.random.get_state()
    with fork_rng(device):
        set_seed(seed, device)
        if torch.cuda.is_available():  # a user's function may draw on any GPU
            torch.cuda.manual_seed_all(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
