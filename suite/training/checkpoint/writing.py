"""Saving while training goes on.

    stage 0   snapshot | steps ...                              | settle, snapshot ...     at a save point tensors are
      thread           layers, all shares? manifest, rotate                                copied to host memory;
    stage 1   snapshot | steps ...                              | settle, snapshot ...     the rest is done beside
      thread           layers, share                                                       the training

The threads of a save meet in the files alone. torch.distributed, whose groups the training uses meanwhile, is used at
save points only: there all workers learn how the last save went, and decide the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suite.errors import CheckpointError
from suite.pipeline.stage import Stage
from suite.pipeline.topology import Place
from suite.training.checkpoint.flight import Flight, Publication, Snapshot, folder_of
from suite.training.checkpoint.storage import Storage
from suite.training.optimizer import StageOptimizer

LIMIT = 3
"""Saves in a row that may fail."""

DEADLINE_S = 120.0
"""Seconds that a save point waits for the save before it: for all workers' files, and then for the manifest. The others
stand in a collective meanwhile, so it is well below the group's time-out."""


class Saver:
    """Saves one worker's share of the run; on the first rank also publishes what all have written."""

    def __init__(
        self, storage: Storage, stage: Stage, optimizer: StageOptimizer, place: Place,
        notes: Callable[[int], dict[str, Any]], say: Callable[[str], None], start: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        """``notes`` turns the units seen into what the manifest keeps; ``say`` is used on the first rank alone.
        ``start`` is the step of the checkpoint that the run was taken up from, 0 for none.

        Raises CheckpointError when the place of the checkpoints cannot be listed.
        """
        self._storage, self._stage, self._optimizer, self._place = storage, stage, optimizer, place
        self._notes, self._say, self._deadline_s = notes, say, deadline_s
        self._flight: Flight | None = None
        self._under_way: int | None = None
        """The step that is being saved; also known to the replicas that write nothing."""
        self._newest, self._finite = start, 0
        self._failures, self._fault = 0, ""
        self._given_up: set[str] = set()
        """Folders of a future that the resume gave up: emptied before they are written to again."""
        if place.rank == 0:
            try:
                self._given_up = {name for name in storage.folders() if int(name) > start}
            except OSError as error:
                raise CheckpointError(f"checkpoints cannot be kept there: {error}") from None

    def stepped(self, step: int, applied: bool) -> None:
        """Hears of every step: a finite one after a checkpoint proves that checkpoint good."""
        if applied:
            self._finite = step

    def save(self, step: int, units: int) -> None:
        """Begins to write the state after ``step`` steps; returns once it is copied. All workers must call it.

        Waits for the save before it. One that failed is said, and this one tried all the same.

        Raises CheckpointError, on all workers, when LIMIT saves in a row have failed.
        """
        self.settle()
        self._end_if_hopeless()
        told = self._agree(step)
        if told:
            self._failed(step, told)
            self._end_if_hopeless()
            return
        snapshot = self._snapshot()
        self._under_way = step
        if self._place.replica == 0:
            publication = None
            if self._place.rank == 0:
                proven = self._newest if 0 < self._newest < self._finite else None
                publication = Publication(self._place.stages, self._notes(units), proven, self._say)
            self._flight = Flight(self._storage, step, self._word, snapshot, self._place.stage, publication)

    def settle(self) -> None:
        """Waits until the save under way is done or has failed, and says so. All workers must call it."""
        step, self._under_way = self._under_way, None
        if step is None:
            return
        mine = self._flight.wait_written(self._deadline_s) if self._flight is not None else None
        told = self._gather(mine)
        if self._flight is not None and self._place.rank == 0:
            if told:
                self._flight.give_up()
            fault = self._flight.wait_over(self._deadline_s)
            self._flight.give_up()
            told = "" if self._flight.published else told or self._named(fault)
        shared = [told]
        dist.broadcast_object_list(shared, src=0)
        if shared[0]:
            self._failed(step, shared[0])
        else:
            self._newest, self._failures = step, 0

    def finish(self, step: int, units: int) -> None:
        """Returns once the state after the last step is saved, trying again where that fails. All workers must call it.

        Raises CheckpointError, on all workers, when LIMIT saves in a row have failed.
        """
        self.settle()
        while self._newest != step:
            self.save(step, units)
            self.settle()

    def _agree(self, step: int) -> str:
        """Returns why no worker can begin a save, if one cannot; else all know the word of this one."""
        fault = None
        if self._flight is not None and not self._flight.ends_within(self._deadline_s):
            fault = f"still busy with the save of step {self._flight.step}"
        folder = folder_of(step)
        if fault is None and folder in self._given_up:
            try:
                self._storage.remove_folder(folder)
                self._given_up.discard(folder)
            except OSError as error:
                fault = str(error)
        told = self._gather(fault)
        words = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(words, src=0)
        self._word = words[0]
        return told

    def _snapshot(self) -> Snapshot:
        """Copies the first replica's layers to host memory, optimizer state gathered over all replicas."""
        taken: Snapshot = {}
        for index, layer in zip(self._stage.indices, self._stage.layers, strict=True):
            tensors = {f"value/{name}": value for name, value in layer.state_dict().items()}
            for name, _ in layer.named_parameters():
                state = self._optimizer.state((index, name))
                tensors |= {f"state/{name}/{part}": value for part, value in state.items()}
            if self._place.replica == 0:
                taken[index] = {name: _copied(value) for name, value in tensors.items()}
        return taken

    def _gather(self, fault: str | None) -> str:
        """Returns the faults of all workers, with their places; empty when there are none."""
        faults: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(faults, self._named(fault))
        return "; ".join(filter(None, faults))

    def _named(self, fault: str | None) -> str:
        return f"{self._place}: {fault}" if fault else ""

    def _failed(self, step: int, fault: str) -> None:
        self._failures, self._fault = self._failures + 1, fault
        if self._place.rank == 0:
            with suppress(OSError):  # the disk may be full for this, too
                self._say(
                    f"the checkpoint of step {step} was not written ({fault}); training goes on; {self._newest_told()}"
                )

    def _newest_told(self) -> str:
        return f"the newest is that of step {self._newest}" if self._newest else "there is none yet"

    def _end_if_hopeless(self) -> None:
        if self._failures >= LIMIT:
            raise CheckpointError(
                f"{self._failures} checkpoints in a row could not be written to {self._storage.location}, fewer than "
                f"{LIMIT} are borne; {self._newest_told()}; the last fault: {self._fault}; make room there, and "
                "resume"
            )


def _copied(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
