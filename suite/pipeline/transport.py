"""Messages between stages: announced, tagged, received ahead of need, sent without waiting.

    stage k      F0 ----a0---> stage k+1       receives are posted WINDOW messages before they are taken,
                 F1 ----a1--->                 so a tensor arrives while the stage computes;
                 B1 <---g1----                 sends are not waited for, but for the oldest of many

Neighbours have a lane each way; cells between which a skip goes (``suite.pipeline.skip``) have one too. What goes from
one cell of a stage to another stays on the device, and is handed over without a message.

On a CPU every wait has a deadline, and one that fails says which message of which stage was missing. On a GPU the
stream waits and the host goes on; how long that may take is the groups' time-out and the supervisor's.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from suite.errors import NeighbourLostError, StallError
from suite.pipeline.boundary import Announcement, TensorSpec, dense
from suite.pipeline.layers import Tensors
from suite.pipeline.recorder import Recorder
from suite.pipeline.skip import Cargo
from suite.pipeline.topology import CellPair, Group, Groups, Place

WINDOW = 2
"""Receives posted ahead: one is on its way while one is taken; more would only hold memory."""

OUTSTANDING = 4
"""Messages sent and perhaps not yet taken. A neighbour takes its messages in order and posts ahead, so the oldest of so
many has as good as always left; waiting for it keeps what was sent from piling up over a mini-batch. A stage d stages
away takes its messages d - 1 micro-batches later, so as many more may be under way to it."""

_TENSORS_A_MESSAGE = 64


def outstanding(stages: int, turns: int) -> int:
    """Returns how many messages to a neighbour may be under way from a cell, where a stage holds ``turns`` of them.

    Then the last stage and the first send each other a group of K micro-batches, forward and back, before either takes
    the other's first; with much fewer under way both would wait for ever, from K = 14 on. What ``validate`` needs grows
    to K / 2 + 2 (of K to 64, some M between K and 4 K, 2 to 4 turns).
    """
    return OUTSTANDING if turns == 1 else max(OUTSTANDING, 2 * stages // 3)


@dataclass
class Deadline:
    """How long any single wait may last, in seconds; the loop shortens it once it knows how long a step takes."""

    seconds: float
    waiting: str = ""
    """The message that is waited for now."""
    ended: float = 0.0
    """When the last wait was over."""
    began: float = 0.0
    """When the last wait began."""
    waited: float = 0.0
    """Seconds of all waits that are over."""

    def waited_now(self) -> float:
        """Returns the seconds of all waits so far, the present one's included."""
        return self.waited + (time.monotonic() - self.began if self.waiting else 0.0)


def wait(work: dist.Work, deadline: Deadline, what: str, device: torch.device) -> None:
    """Waits for one message of tensors on ``device``. Raises StallError when the deadline passes or the other side is
    gone. On a GPU only the current stream waits: with a time-out NCCL would block the host until the tensor is there.
    """
    deadline.began, deadline.waiting = time.monotonic(), what
    try:
        if device.type == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=deadline.seconds))
    except RuntimeError as error:
        explained = explain(error, what, deadline.seconds)
        if explained is error:
            raise
        raise explained from error
    deadline.waiting, deadline.ended = "", time.monotonic()
    deadline.waited += deadline.ended - deadline.began


def explain(error: RuntimeError, what: str, seconds: float) -> RuntimeError | StallError:
    """Returns a StallError for a wait that ran out of time or lost its other side, and any other error as it is."""
    text = str(error).lower()
    if "gloo" not in text and "nccl" not in text:
        return error
    if "timed out" in text or "timeout" in text:
        return StallError(f"waited {seconds:.0f} s for {what}")
    if re.search("connection|broken pipe|socket|remote", text):
        return NeighbourLostError(f"lost the connection while waiting for {what}; that process has ended, see its log")
    return error


class Inbox:
    """The messages of one lane of one mini-batch, in the order in which they will be taken."""

    def __init__(
        self, source: int, group: Group, messages: Sequence[tuple[int, Sequence[TensorSpec]]],
        step: int, device: torch.device, deadline: Deadline, what: str,
    ) -> None:  # fmt: skip
        self._source, self._group, self._step = source, group, step
        self._device, self._deadline, self._what = device, deadline, what
        self._coming: Iterator[tuple[int, Sequence[TensorSpec]]] = iter(messages)
        self._posted: deque[tuple[int, Tensors, list[dist.Work]]] = deque()
        for _ in range(WINDOW):
            self._post()

    def _post(self) -> None:
        message = next(self._coming, None)
        if message is None:
            return
        micro_batch, specs = message
        tensors = tuple(spec.empty(self._device) for spec in specs)
        works = [
            dist.irecv(dense(tensor), self._source, group=self._group, tag=_tag(self._step, micro_batch, at))
            for at, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        self._posted.append((micro_batch, tensors, [work for work in works if work is not None]))

    def take(self, micro_batch: int) -> Tensors:
        """Returns one micro-batch's tensors, waiting for them if they have not arrived, and posts the next receive."""
        expected, tensors, works = self._posted.popleft()
        assert expected == micro_batch, f"{self._what}: {expected} comes next, {micro_batch} was asked for"
        for work in works:
            wait(work, self._deadline, f"{self._what} of micro-batch {micro_batch}", self._device)
        self._post()
        return tensors


class Inboxes:
    """All lanes into a cell in one direction: each micro-batch's tensors come together in their places."""

    def __init__(
        self, takes: dict[int, Callable[[int], Tensors]], places: dict[int, dict[int, tuple[int, ...]]]
    ) -> None:  # fmt: skip
        """``takes`` return a micro-batch's tensors by the cell that they come from, ``places[i]`` are those of
        micro-batch i."""
        self._takes, self._places = takes, places

    def take(self, micro_batch: int) -> Tensors:
        """Returns one micro-batch's tensors, in the order of their places; waits as ``Inbox.take`` does."""
        found: dict[int, Tensor] = {}
        for peer, places in self._places[micro_batch].items():
            found.update(zip(places, self._takes[peer](micro_batch), strict=True))
        return tuple(found[at] for at in sorted(found))


LocalMessages = dict[tuple[int, int, int], Tensors]
"""Tensors that one cell of a stage made for another and that this has not taken yet, by the two and micro-batch."""


def meetings(lanes: Iterable[CellPair], stage: int, stages: int) -> Iterator[tuple[str, CellPair, bool]]:
    """Yields whom a stage meets before its first mini-batch, in order: the kind of message, the lane, and whether this
    stage is the one that sends. All stages go through the lanes in one order, so nobody waits in a circle."""
    for kind in ("activations", "gradients"):
        for lane in sorted(lanes):
            if stage in (cell % stages for cell in lane):
                yield kind, lane, lane[0] % stages == stage


def warm_up(place: Place, groups: Groups, device: torch.device) -> None:
    """Has stages with a lane between them meet once in each direction's group before anything is posted ahead.

    NCCL makes the communicator of a pair at its first message and blocks until both are there: a gradient receive
    posted ahead would wait for the first gradient before the first activation could go. gloo needs none of it.
    """
    if device.type != "cuda":
        return
    token = torch.zeros(1, device=device)
    for kind, lane, sends in meetings(groups.p2p_group_index, place.stage, place.stages):
        group = getattr(groups, kind)[groups.p2p_group_index[lane]]
        peer = place.rank_of(place.replica, lane[sends] % place.stages)
        if sends:
            dist.send(token, peer, group=group)
        else:
            dist.recv(token, peer, group=group)


class Transport:
    """The lanes of one cell to other stages' cells; a lane's ends are cells, v * K + k being the v-th of stage k."""

    def __init__(
        self, place: Place, groups: Groups, device: torch.device, deadline: Deadline, local: LocalMessages,
        turn: int = 0, unsent: int = OUTSTANDING,
    ) -> None:  # fmt: skip
        """``local`` is that of all cells of the stage; ``unsent`` messages to a neighbour may be under way."""
        self.place, self.groups, self.device, self.deadline = place, groups, device, deadline
        self._local = local
        self.cell, self._unsent = turn * place.stages + place.stage, unsent
        self.recorder: Recorder | None = None
        """Told of waits for room; those for messages are the executor's."""
        self.late: Callable[[], None] | None = None
        """What a test plans to hold up each message with."""
        self._sent: dict[int, deque[tuple[list[tuple[dist.Work, Tensor]], str]]] = {}

    def announce(self, announcement: Announcement, names: Sequence[str]) -> None:
        """Tells the next stage what will cross in this mini-batch; ``names`` are the model's skips."""
        vector = announcement.encode(names)
        tensors = (torch.tensor([vector.numel()]), vector)
        self._send(tensors, self.cell + 1, self._group("activations", self.cell + 1), 0, "an announcement")

    def heed(self, names: Sequence[str]) -> Announcement:
        """Returns what the stage before announces. Raises StallError when it does not."""
        what = f"the announcement of {self._named(self.cell - 1)}"
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, 0, what)
        vector = torch.zeros(int(length), dtype=torch.int64)
        self._receive(vector, 1, what)
        return Announcement.decode(vector, names)

    def activations(self, messages: Sequence[tuple[int, Cargo]], step: int) -> Inboxes:
        """Posts the receives of what other stages will send forward."""
        lanes = {i: dict(cargo.lanes) for i, cargo in messages}
        return self._inboxes(messages, lanes, "activations", step)

    def gradients(self, messages: Sequence[tuple[int, Cargo]], step: int) -> Inboxes:
        """Posts the receives of what other stages will send back."""
        lanes = {i: dict(cargo.back) for i, cargo in messages}
        return self._inboxes(messages, lanes, "gradients", step)

    def _inboxes(
        self, messages: Sequence[tuple[int, Cargo]], lanes: dict[int, dict[int, tuple[int, ...]]], kind: str, step: int
    ) -> Inboxes:
        coming: dict[int, list[tuple[int, list[TensorSpec]]]] = {}
        for i, cargo in messages:
            for peer, places in lanes[i].items():
                coming.setdefault(peer, []).append((i, [cargo.boundary[at] for at in places]))
        return Inboxes({peer: self._inbox(peer, kind, specs, step) for peer, specs in coming.items()}, lanes)

    def _inbox(
        self, peer: int, kind: str, messages: Sequence[tuple[int, list[TensorSpec]]], step: int
    ) -> Callable[[int], Tensors]:  # fmt: skip
        if self._is_local(peer):
            return lambda micro_batch: self._local.pop((peer, self.cell, micro_batch))
        what = f"the {kind} from {self._named(peer)}"
        return Inbox(
            self._rank(peer), self._group(kind, peer), messages, step, self.device, self.deadline, what
        ).take  # fmt: skip

    def send_activations(self, tensors: Sequence[Tensor], cargo: Cargo, micro_batch: int, step: int) -> None:
        """Sends one micro-batch forward, each tensor to its stage, and does not wait for it."""
        what = f"the activations of micro-batch {micro_batch}"
        for peer, places in cargo.lanes:
            sent = [tensors[at].detach().contiguous(memory_format=cargo.boundary[at].layout) for at in places]
            self._give(sent, peer, "activations", micro_batch, step, what)

    def send_gradients(self, tensors: Sequence[Tensor], cargo: Cargo, micro_batch: int, step: int) -> None:
        """Sends one micro-batch's gradients back, in the order of what has one, and does not wait for them."""
        what = f"the gradients of micro-batch {micro_batch}"
        places = sorted(at for _, lane in cargo.back for at in lane)
        of_place = dict(zip(places, tensors, strict=True))
        for peer, lane in cargo.back:
            sent = [of_place[at].contiguous(memory_format=cargo.boundary[at].layout) for at in lane]
            self._give(sent, peer, "gradients", micro_batch, step, what)

    def flush(self) -> None:
        """Waits until all that was sent has left; then its memory is free."""
        assert not self._local, f"nobody took what was handed over: {sorted(self._local)}"
        for sent in self._sent.values():
            self._wait_for_oldest(sent, leave=0)

    def _wait_for_oldest(self, sent: deque[tuple[list[tuple[dist.Work, Tensor]], str]], leave: int) -> None:
        if len(sent) <= leave:
            return
        with self.recorder.waiting() if self.recorder is not None else nullcontext():
            while len(sent) > leave:
                works, what = sent.popleft()
                for work, tensor in works:
                    wait(work, self.deadline, f"{what} to be taken by the stage they were sent to", tensor.device)

    def _give(self, tensors: Sequence[Tensor], peer: int, kind: str, micro_batch: int, step: int, what: str) -> None:
        """Hands a micro-batch's tensors to another cell, as a message or on the device."""
        if self._is_local(peer):
            self._local[self.cell, peer, micro_batch] = tuple(tensors)
        else:
            self._send(tensors, peer, self._group(kind, peer), _tag(step, micro_batch, 0), what)

    def _send(self, tensors: Sequence[Tensor], peer: int, group: Group, tag: int, what: str) -> None:
        if self.late is not None:
            self.late()
        works = []
        for at, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                continue
            tensor = dense(tensor)
            work = dist.isend(tensor, self._rank(peer), group=group, tag=tag + at)
            if work is not None:
                works.append((work, tensor))
        distance = abs(peer - self.cell)
        sent = self._sent.setdefault(0 if distance == 1 else peer - self.cell, deque())
        sent.append((works, what))
        self._wait_for_oldest(sent, leave=self._unsent + distance - 1)

    def _rank(self, peer: int) -> int:
        return self.place.rank_of(self.place.replica, peer % self.place.stages)

    def _group(self, kind: str, peer: int) -> Group:
        groups: tuple[Group, ...] = getattr(self.groups, kind)
        return groups[self.groups.p2p_group_index[min(self.cell, peer), max(self.cell, peer)]]

    def _is_local(self, peer: int) -> bool:
        return peer % self.place.stages == self.place.stage

    def _named(self, peer: int) -> str:
        turn, stage = divmod(peer, self.place.stages)
        return f"stage {stage}" + (f", its cell {turn}" if turn or self.cell >= self.place.stages else "")

    def _receive(self, tensor: Tensor, tag: int, what: str) -> None:
        peer = self.cell - 1
        work = dist.irecv(tensor, self._rank(peer), group=self._group("activations", peer), tag=tag)
        if work is not None:
            wait(work, self.deadline, what, tensor.device)


def _tag(step: int, micro_batch: int, tensor: int) -> int:
    """A number for (step, micro-batch, tensor) above the two of announcements; lane and direction are the group's."""
    assert tensor < _TENSORS_A_MESSAGE, f"more than {_TENSORS_A_MESSAGE} tensors in one boundary"
    return 2 + tensor + _TENSORS_A_MESSAGE * (micro_batch % 4096 + 4096 * (step % 1024))
