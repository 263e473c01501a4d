"""Saves checkpoints while training continues.

    rank 0    snapshot | steps ...                              | settle, snapshot ...     a save point copies tensors
      thread           layers, wait, manifest, rotate                                      to host memory; the rest
    rank 1    snapshot | steps ...                              | settle, snapshot ...     runs beside the training
      thread           layers, file list

Layer i is written by replica i mod R of its stage; a layer with buffers by replica 0, because replicas may differ in
them. The threads of a save communicate only through files, because the training uses the process groups meanwhile.
Workers use torch.distributed only at save points, where all of them learn the result of the last save and decide alike.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from suite.errors import CheckpointError
from suite.exchange import all_gather, broadcast
from suite.log import Log
from suite.training.checkpoint.async_save import AsyncSave, ManifestJob, Snapshot, folder_of
from suite.training.checkpoint.ownership import check_owner, claim
from suite.training.checkpoint.retention import ABANDONED
from suite.training.checkpoint.storage import MANIFEST, Storage
from suite.training.stage_optimizer import StageOptimizer

LIMIT = 3
"""Failed saves in a row that end the run."""

DEADLINE_S = 120.0
"""Seconds that a save point waits for the previous save while none of its workers finishes a layer, and then for the
manifest. The others wait in a collective meanwhile, so this is well below the group's timeout."""


class Saver:
    """Saves one worker's part of the state; on rank 0 also publishes the checkpoint."""

    def __init__(
        self,
        storage: Storage,
        optimizer: StageOptimizer,
        notes: Callable[[int], dict[str, Any]],
        log: Log,
        start: int = 0,
        deadline_s: float = DEADLINE_S,
        on_failure: Callable[[int], None] = lambda step: None,
        owner: str = "",
        on_published: Callable[[int], None] = lambda step: None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``notes`` returns the manifest's notes for the units seen; only rank 0 uses ``log``. ``start`` is the step of
        the checkpoint that the run resumed from, 0 for none. ``on_failure`` gets the step of each save that failed and
        is not tried again, on all workers. ``owner`` names the driver, which now owns the checkpoints. Rank 0 calls
        ``on_published`` with each step before older checkpoints are removed. A save point that goes on waiting, because
        layers were written, calls ``on_progress``.

        Raises CheckpointError when the location of the checkpoints cannot be listed or written.
        """
        self._storage, self._optimizer, self._coord = storage, optimizer, optimizer.coord
        self._notes, self._log, self._deadline_s, self._on_failure = notes, log, deadline_s, on_failure
        self._owner, self._on_published, self._on_progress = owner, on_published, on_progress
        self._save: AsyncSave | None = None
        self._saving_step: int | None = None
        """The step of the running save; workers that write nothing also know it."""
        self._newest, self._last_finite = start, 0
        self._failures, self._last_fault = 0, ""
        self._last_step: int | None = None
        """Known once it is saved, as often as it takes."""
        self._stale: set[str] = set()
        """Folders of steps after the resumed one."""
        self._own = {
            index
            for index, layer in optimizer.stage.by_index.items()
            if self._coord.replica == (0 if any(True for _ in layer.buffers()) else index % self._coord.replicas)
        }
        """The layers that this worker writes."""
        self._writers = [rank for rank, layers in enumerate(all_gather(len(self._own))) if layers or not rank]
        if self._coord.rank == 0:
            try:
                claim(storage, owner)  # before the listing: what another driver publishes after it is not ours
                self._stale = {name for name in storage.folders() if int(name) > start}
            except OSError as error:
                raise CheckpointError(f"checkpoints cannot be listed or written: {error}") from None

    def on_step_end(self, step: int, applied: bool) -> None:
        """Notes a step. A finite step after a checkpoint proves that checkpoint good."""
        if applied:
            self._last_finite = step

    def save(self, step: int, units: int, best: bool = False) -> None:
        """Starts saving the state after ``step`` steps and returns when it is copied. All workers must call it.

        ``best`` marks the checkpoint: it is kept until one of a better validation is saved. Waits for the previous
        save. Logs its failure, and starts this one anyway.

        Raises CheckpointError, on all workers, when LIMIT saves in a row have failed.
        """
        self.wait()
        self._check_failures()
        if fault := self._check_ready(step):
            self._failed(step, fault)
            self._check_failures()
            return
        snapshot = self._snapshot()
        self._saving_step = step
        if self._coord.rank in self._writers:
            manifest_job = None
            if self._coord.rank == 0:
                good_step = self._newest if 0 < self._newest < self._last_finite else None
                context = self._notes(units), good_step, best, self._log, self._owner, self._on_published
                manifest_job = ManifestJob(*context, set(self._stale), self._writers)
            self._save = AsyncSave(self._storage, step, self._save_id, snapshot, self._coord.rank, manifest_job)

    def wait(self) -> None:
        """Waits for the running save to end and logs a failure. All workers must call it."""
        step, self._saving_step = self._saving_step, None
        if step is None:
            return
        faults = self._wait_for_files()
        if self._save is not None and self._coord.rank == 0:
            if faults:
                self._save.give_up()
            own_fault = self._save.wait_ended(self._deadline_s)
            self._save.give_up()
            faults = "" if self._save.published else faults or self._with_rank(own_fault)
        if faults := broadcast(faults):
            self._failed(step, faults)
        else:
            self._newest, self._failures = step, 0

    def _wait_for_files(self) -> str:
        """Waits until all workers have written their layers, or none of them goes on; returns their faults."""
        while True:
            fault, goes_on = self._save.wait_written(self._deadline_s) if self._save is not None else (None, False)
            states = all_gather([self._with_rank(fault), goes_on])
            if not any(goes_on for _, goes_on in states):
                return "; ".join(fault for fault, _ in states if fault)
            self._on_progress()

    def finish(self, step: int, units: int, best: bool = False) -> None:
        """Returns when the state after the last step is saved; retries a failed save. All workers must call it.

        Raises CheckpointError, on all workers, when LIMIT saves in a row have failed.
        """
        self._last_step = step
        self.wait()
        while self._newest != step:
            self.save(step, units, best)
            self.wait()

    def _check_ready(self, step: int) -> str:
        """Returns why a worker cannot start a save, empty if all can. All workers then have the same new save id."""
        fault = None
        if self._save is not None and not self._save.ends_within(self._deadline_s):
            fault = f"still busy with the save of step {self._save.step}"
        folder = folder_of(step)
        if fault is None and self._coord.rank == 0:
            try:
                check_owner(self._storage, self._owner)
                if folder in self._stale:
                    # a damaged or an unfinished one goes; an abandoned one stays until this save replaces it, and what
                    # a late driver may yet publish stays
                    if len({MANIFEST, ABANDONED} & self._storage.names(folder)) == 1:
                        self._storage.remove_folder(folder)
                    self._stale.discard(folder)
            except OSError as error:
                fault = str(error)
        faults = "; ".join(filter(None, all_gather(self._with_rank(fault))))
        self._save_id = broadcast(uuid.uuid4().hex[:12])
        return faults

    def _snapshot(self) -> Snapshot:
        """Copies the layers that this worker writes to host memory, with optimizer state gathered over all replicas."""
        snapshot: Snapshot = {}
        stage = self._optimizer.stage
        for index, layer in zip(stage.indices, stage.layers, strict=True):
            tensors = {f"value/{name}": value for name, value in layer.state_dict().items()}
            for name, _ in layer.named_parameters():
                state = self._optimizer.state((index, name))
                tensors |= {f"state/{name}/{part}": value for part, value in state.items()}
            if index in self._own:
                snapshot[index] = {name: _to_host(value) for name, value in tensors.items()}
        return snapshot

    def _with_rank(self, fault: str | None) -> str:
        return f"{self._coord}: {fault}" if fault else ""

    def _failed(self, step: int, fault: str) -> None:
        self._failures, self._last_fault = self._failures + 1, fault
        if step != self._last_step:
            self._on_failure(step)
        if self._coord.rank == 0:
            with suppress(OSError):  # the log may be on the same full disk
                self._log(
                    f"the checkpoint of step {step} was not written ({fault}); training continues; "
                    f"{self._newest_text()}"
                )

    def _newest_text(self) -> str:
        return f"the newest checkpoint is of step {self._newest}" if self._newest else "there is no checkpoint yet"

    def _check_failures(self) -> None:
        if self._failures >= LIMIT:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be written to {self._storage.shown('')}, "
                f"the limit is {LIMIT}; {self._newest_text()}; the last fault: {self._last_fault}; "
                "fix the storage, such as by freeing space, and resume"
            )


def _to_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
