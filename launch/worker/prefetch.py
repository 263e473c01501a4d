"""Prepares the next mini-batch in a thread while the current one trains.

stage 0           F0 F1 F2 .  .  .  B2 B1 B0 | F0 F1 F2 .  .  .  B2 B1 B0
prefetch thread            batch 4, shapes              batch 5, shapes      in the bubble

last stage        .  .  F0 F1 F2 B2 B1 B0    | .  .  F0 F1 F2 B2 B1 B0
prefetch thread   batch 4                      batch 5

On CPU cores the thread takes time from the stage's computation, so it works while the stage waits. Beside a GPU it only
receives what feed processes have made (``launch.worker.feed_processes``). A mini-batch depends only on its step, so an
unused one does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import torch

from suite.errors import DataError
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.runtime.worker_status import FIRST_ACTION_TIMEOUT_S


class Prefetcher:
    """Returns a worker's mini-batches, each prepared one step ahead."""

    def __init__(
        self,
        make: Callable[[int], ReplicaBatch | None],
        steps: int,
        prepare: Callable[[ReplicaBatch], object] | None = None,
        ahead: bool = True,
        start_at_once: bool = True,
    ) -> None:
        """``make`` returns the mini-batch of one of the first ``steps`` steps; ``prepare`` is called with each in the
        prefetch thread. With ``ahead`` False nothing is prefetched: other people's data may draw from the generator
        that dropout uses in the main thread. With ``start_at_once`` False the next mini-batch is prepared from the call
        of ``start_next`` on."""
        self._make, self._steps, self._prepare, self._ahead = make, steps, prepare, ahead
        self._start_at_once, self._following = start_at_once, 0
        threads = torch.get_num_threads()  # by default a new thread would use all cores
        self._thread = ThreadPoolExecutor(1, "batches", initializer=lambda: torch.set_num_threads(threads))
        self._started: dict[int, Future[ReplicaBatch | None]] = {}
        """By step."""

    def __call__(self, step: int) -> ReplicaBatch | None:
        """Returns a step's mini-batch and, with ``start_at_once``, starts the next one. Raises the exceptions of
        ``make`` and ``prepare``."""
        if not self._ahead:
            return self._make_and_prepare(step)
        started = self._started.pop(step, None) or self._thread.submit(self._make_and_prepare, step)
        try:
            batch = started.result(FIRST_ACTION_TIMEOUT_S)
        except FutureTimeoutError:
            raise DataError(
                f"the mini-batch of step {step + 1} was not ready within {FIRST_ACTION_TIMEOUT_S:.0f} s; check that "
                "the disk with the prepared data responds"
            ) from None
        self._following = step + 1
        if batch is not None and self._start_at_once:
            self.start_next()
        return batch

    def start_next(self) -> None:
        """Starts to prepare the step after the one that was returned last, if there is one and it has not started."""
        step = self._following
        if self._ahead and step < self._steps and step not in self._started:
            self._started[step] = self._thread.submit(self._make_and_prepare, step)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make_and_prepare(self, step: int) -> ReplicaBatch | None:
        batch = self._make(step)
        if batch is not None and self._prepare is not None:
            self._prepare(batch)
        return batch
