"""Seeds the generators that somebody else's code may draw from, and restores them after."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import numpy as np
import torch

from suite.pipeline.model import rng


def seeded(*values: int) -> AbstractContextManager[None]:
    """A context in which torch, numpy and ``random`` draw the same numbers in every process.

    Use it only in the main thread: layers draw from the same generators.
    """
    return rng.seeded(rng.mix(5, *values), torch.device("cpu"))


def random_state() -> tuple[object, ...]:
    """Returns the states of the three generators, to compare."""
    return bytes(torch.get_rng_state().numpy()), repr(np.random.get_state()), random.getstate()
