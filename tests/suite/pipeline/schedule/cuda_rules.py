"""The proof of ``nccl_proof`` with two more rules of CUDA: launches that wait for an idle device, and few queues."""

from collections.abc import Collection
from functools import partial
from typing import Literal
from unittest.mock import patch

from suite.pipeline.model.topology import CellPair
from suite.pipeline.schedule.action import Action, Schedule, virtual_stages_of
from suite.pipeline.schedule.flow_control import FlowControl, flow_control
from tests.suite.pipeline.schedule import nccl_proof
from tests.suite.pipeline.schedule.nccl_proof import StageLaunches, Wait, Waits

IdleWaits = Literal["never", "first launch", "every launch"]
"""Which actions wait until the device is idle: the first of each kind in each cell, whose kernels are loaded lazily; or
every one, as after a failed allocation."""


class CudaLaunches(StageLaunches):
    """What the host of a stage launches, with the rules of CUDA."""

    def __init__(self, *arguments, idle_waits: IdleWaits, warms_up: bool, queues: int | None) -> None:
        """With ``warms_up`` each kind of action is launched once before the first receive is posted. Without ``queues``
        all streams make progress independently."""
        super().__init__(*arguments)
        self._idle_waits, self._queues = idle_waits, queues
        self._launched: set[tuple[str, int]] = set()
        self._stream_numbers: dict[object, int] = {}
        if warms_up:
            self._warm_up()

    def _warm_up(self) -> None:
        """Exchanges the metadata of all cells, and launches each kind of action of each cell once."""
        for virtual_stage in range(virtual_stages_of([self._actions])):
            self._exchange_metadata(self._placement.cell_of(virtual_stage, self._stage))
        self._exchange_metadata = lambda cell: None
        for kind, virtual_stage in dict.fromkeys((a.kind, a.virtual_stage) for a in self._actions):
            self._compute(Action(kind, 0, virtual_stage))

    def _compute(self, action: Action) -> None:
        launch = action.kind, action.virtual_stage
        if self._idle_waits == "every launch" or (self._idle_waits == "first launch" and launch not in self._launched):
            name = Wait(self._stage, f"{action} waits until the device is idle")
            ends = [end for ends in self._stream_ends.values() for end in ends]
            self._host = [self._waits.add(name, [*self._host, *self._before_compute, *ends])]
        self._launched.add(launch)
        super()._compute(action)

    def _before(self, stream: object) -> list[int]:
        queue = self._queue(stream)
        same = [ends for other, ends in self._stream_ends.items() if queue is not None and self._queue(other) == queue]
        return [*super()._before(stream), *(end for ends in same for end in ends)]

    def _queue(self, stream: object) -> int | None:
        number = self._stream_numbers.setdefault(stream, len(self._stream_numbers))
        return None if self._queues is None else number % self._queues


def launched(
    schedule: Schedule,
    pairs: Collection[CellPair] = (),
    flow: FlowControl | None = None,
    idle_waits: IdleWaits = "never",
    warms_up: bool = False,
    queues: int | None = None,
    cell_to_stage: tuple[int, ...] = (),
) -> Waits:
    """Returns the waits of ``nccl_proof.launched`` under these rules; ``flow`` is by default that of NCCL."""
    rules = partial(CudaLaunches, idle_waits=idle_waits, warms_up=warms_up, queues=queues)
    flow = flow or flow_control("nccl", len(schedule), virtual_stages_of(schedule))
    with patch.object(nccl_proof, "StageLaunches", rules):
        return nccl_proof.launched(schedule, flow, pairs, cell_to_stage)
