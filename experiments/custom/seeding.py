"""Seeds the generators that somebody else's code may draw from, and restores them after."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from suite.pipeline.model.rng import mix


@contextmanager
def seeded(*values: int) -> Iterator[None]:
    """A context in which torch, numpy and ``random`` draw the same numbers in every process.

    Use it only in the main thread: layers draw dropout from the same generator of torch.
    """
    before = random.getstate(), np.random.get_state()
    seed = mix(5, *values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def random_state() -> tuple[object, ...]:
    """Returns the states of the three generators, to compare."""
    return bytes(torch.get_rng_state().numpy()), repr(np.random.get_state()), random.getstate()
