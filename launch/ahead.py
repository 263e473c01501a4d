"""The next mini-batch is made while this one trains.

main thread    step 3 ............... step 4 ...............      a mini-batch is a function of its step alone, so
beside it        batch 4, its shapes    batch 5, its shapes       one that is made in vain does no harm
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from suite.errors import DataError
from suite.pipeline.microbatch import MiniBatch
from suite.training.loop import FIRST_DEADLINE


class Ahead:
    """Gives a worker its mini-batches, each made one step before it is asked for."""

    def __init__(
        self, make: Callable[[int], MiniBatch | None], steps: int, warm: Callable[[MiniBatch], object] | None = None
    ) -> None:
        """``make`` returns the mini-batch of any of the first ``steps``; ``warm`` is called with each beside the
        training, to do what can be done before it is trained on."""
        self._make, self._steps, self._warm = make, steps, warm
        threads = torch.get_num_threads()  # a new thread would take all cores
        self._beside = ThreadPoolExecutor(1, "batches", initializer=lambda: torch.set_num_threads(threads))
        self._next: tuple[int, Future[MiniBatch | None]] | None = None

    def __call__(self, step: int) -> MiniBatch | None:
        """Returns a step's mini-batch and begins with the next. Raises what making it raised."""
        if self._next is None or self._next[0] != step:
            self._begin(step)
        assert self._next is not None
        try:
            batch = self._next[1].result(FIRST_DEADLINE)
        except FutureTimeoutError:
            raise DataError(
                f"the mini-batch of step {step} was not made within {FIRST_DEADLINE:.0f} s; see whether the disk that "
                "holds the prepared data answers"
            ) from None
        self._next = None
        if batch is not None and step + 1 < self._steps:
            self._begin(step + 1)
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int) -> None:
        self._next = step, self._beside.submit(self._made, step)

    def _made(self, step: int) -> MiniBatch | None:
        batch = self._make(step)
        if batch is not None and self._warm is not None:
            self._warm(batch)
        return batch
