"""Prepares the next mini-batch in a thread while the current one trains.

main thread      step 3 ............... step 4 ...............    a mini-batch depends only on its step, so an
prefetch thread    batch 4, its shapes    batch 5, its shapes     unused one does no harm
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from suite.errors import DataError
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.runtime.worker_status import FIRST_ACTION_TIMEOUT_S


class Prefetcher:
    """Returns a worker's mini-batches, each prepared one step ahead."""

    def __init__(
        self, make: Callable[[int], MiniBatch | None], steps: int, prepare: Callable[[MiniBatch], object] | None = None,
        ahead: bool = True,
    ) -> None:  # fmt: skip
        """``make`` returns the mini-batch of one of the first ``steps`` steps; ``prepare`` is called with each in the
        prefetch thread. With ``ahead`` False nothing is prefetched: other people's data may draw from the generator
        that dropout uses in the main thread."""
        self._make, self._steps, self._prepare, self._ahead = make, steps, prepare, ahead
        threads = torch.get_num_threads()  # by default a new thread would use all cores
        self._thread = ThreadPoolExecutor(1, "batches", initializer=lambda: torch.set_num_threads(threads))
        self._next: tuple[int, Future[MiniBatch | None]] | None = None

    def __call__(self, step: int) -> MiniBatch | None:
        """Returns a step's mini-batch and starts the next one. Raises the exceptions of ``make`` and ``prepare``."""
        if not self._ahead:
            return self._make_and_prepare(step)
        if self._next is None or self._next[0] != step:
            self._start_next(step)
        assert self._next is not None
        try:
            batch = self._next[1].result(FIRST_ACTION_TIMEOUT_S)
        except FutureTimeoutError:
            raise DataError(
                f"the mini-batch of step {step} was not ready within {FIRST_ACTION_TIMEOUT_S:.0f} s; check that the "
                "disk with the prepared data responds"
            ) from None
        self._next = None
        if batch is not None and step + 1 < self._steps:
            self._start_next(step + 1)
        return batch

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start_next(self, step: int) -> None:
        self._next = step, self._thread.submit(self._make_and_prepare, step)

    def _make_and_prepare(self, step: int) -> MiniBatch | None:
        batch = self._make(step)
        if batch is not None and self._prepare is not None:
            self._prepare(batch)
        return batch
