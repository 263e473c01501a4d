"""Point-to-point messages between stages: tagged, received ahead of need, sent without waiting.

    stage k      F0 ----a0---> stage k+1       receives are posted ahead where that costs nothing,
                 F1 ----a1--->                 so a tensor arrives while the stage computes;
                 B1 <---g1----                 a send waits only if too many are in flight

Neighbouring cells exchange messages, and so do cells that a skip connects (``suite.pipeline.runtime.skip``). Before
them each cell sends metadata to the next one: the shapes of this mini-batch. Tensors between two cells of one stage
stay on the device and need no message.

On a CPU every wait has a timeout, and its error says which message of which stage is missing. On a GPU the stream
waits and the host continues; the process groups and the supervisor time out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from suite.device import is_host
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import Group, MessageKind, ProcessGroups, RankCoord
from suite.pipeline.runtime.boundary import TensorSpec, contiguous_view
from suite.pipeline.runtime.communication_errors import explain
from suite.pipeline.runtime.metadata import BoundaryMetadata, MetadataCodec
from suite.pipeline.runtime.packing import message_specs, pack, unpack
from suite.pipeline.runtime.skip import CellBoundary
from suite.pipeline.schedule.flow_control import FlowControl

_MAX_TENSORS_PER_MESSAGE = 64

_HEADER = 512
"""Numbers in the first message of metadata: enough for what a mini-batch usually has to say."""


@dataclass
class MessageTimeout:
    """The longest that one wait may take, in seconds; the training loop sets it once it knows a step's length."""

    seconds: float
    waiting_for: str = ""
    """The message that is being waited for; empty if none."""
    ended_s: float = 0.0
    """When the last wait ended."""
    began_s: float = 0.0
    """When the last wait began."""
    waited_s: float = 0.0
    """Total seconds of finished waits."""

    def total_waited_s(self) -> float:
        """Returns the total seconds of all waits, including the current one."""
        return self.waited_s + (time.monotonic() - self.began_s if self.waiting_for else 0.0)


def wait(work: dist.Work, timeout: MessageTimeout, what: str, device: torch.device) -> None:
    """Waits for one message of tensors on ``device``. Raises StallError when the timeout passes or the peer is gone.

    On a GPU only the current stream waits: with a timeout NCCL would block the host until the tensor has arrived.
    """
    timeout.began_s, timeout.waiting_for = time.monotonic(), what
    with _explained(what, timeout):
        if is_host(device):
            work.wait(timedelta(seconds=timeout.seconds))
        else:
            work.wait()
    timeout.waiting_for, timeout.ended_s = "", time.monotonic()
    timeout.waited_s += timeout.ended_s - timeout.began_s


@contextmanager
def _explained(what: str, timeout: MessageTimeout) -> Iterator[None]:
    """Raises what the library's error means, such as StallError for a message that timed out or lost its peer."""
    try:
        yield
    except RuntimeError as error:
        explained = explain(error, what, timeout.seconds)
        if explained is error:
            raise
        raise explained from error


def recv_into(tensor: Tensor, source: int, group: Group, tag: int, timeout: MessageTimeout, what: str) -> None:
    """Receives one tensor; waits for it as ``wait`` does."""
    with _explained(what, timeout):  # a receive fails at once if the peer's connection is closed
        work = dist.irecv(tensor, source, group=group, tag=tag)
    if work is not None:
        wait(work, timeout, what, tensor.device)


class InflightSends:
    """Messages sent and not known to be received yet, oldest first; their tensors are held until then."""

    def __init__(self, timeout: MessageTimeout) -> None:
        self._timeout = timeout
        self._messages: deque[tuple[list[tuple[dist.Work, Tensor]], str]] = deque()

    def post(self, tensors: Sequence[Tensor], target: int, group: Group, tag: int, what: str) -> None:
        """Starts a send with one tag for each tensor, from ``tag`` on; empty tensors are not sent. ``what`` says what a
        wait for it waits for."""
        works = []
        for at, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                continue
            tensor = contiguous_view(tensor)
            with _explained(what, self._timeout):
                work = dist.isend(tensor, target, group=group, tag=tag + at)
            if work is not None:
                works.append((work, tensor))
        self._messages.append((works, what))

    def wait_until(self, at_most: int) -> None:
        """Waits until at most ``at_most`` messages are in flight."""
        while len(self._messages) > at_most:
            works, what = self._messages.popleft()
            for work, tensor in works:
                wait(work, self._timeout, what, tensor.device)


class RecvQueue:
    """The messages of one mini-batch from one peer, in the order in which they are received."""

    def __init__(
        self,
        source: int,
        group: Group,
        messages: Sequence[tuple[int, Sequence[TensorSpec]]],
        step: int,
        device: torch.device,
        timeout: MessageTimeout,
        what: str,
        ahead: int,
    ) -> None:
        """``ahead`` receives are posted before they are used (``suite.pipeline.schedule.flow_control``)."""
        self._source, self._group, self._step = source, group, step
        self._device, self._timeout, self._what = device, timeout, what
        self._messages: Iterator[tuple[int, Sequence[TensorSpec]]] = iter(messages)
        self._posted: deque[tuple[int, Tensors, list[dist.Work]]] = deque()
        self._ahead = ahead
        self._post(ahead)

    def _post(self, count: int) -> None:
        """Posts receives until ``count`` have not been waited for, or no message is left."""
        while len(self._posted) < count and (message := next(self._messages, None)) is not None:
            micro_batch, specs = message
            tensors = [spec.empty(self._device) for spec in message_specs(specs)]
            with _explained(f"{self._what} of micro-batch {micro_batch}", self._timeout):
                works = [
                    dist.irecv(
                        contiguous_view(tensor), self._source, group=self._group, tag=_tag(self._step, micro_batch, at)
                    )
                    for at, tensor in enumerate(tensors)
                    if tensor.numel()
                ]
            self._posted.append((micro_batch, unpack(tensors, specs), [work for work in works if work is not None]))

    def recv(self, micro_batch: int) -> Tensors:
        """Returns one micro-batch's tensors, waiting for them if they have not arrived, and posts the next receive."""
        self._post(1)
        expected, tensors, works = self._posted.popleft()
        assert expected == micro_batch, f"{self._what}: {expected} is next, {micro_batch} was requested"
        for work in works:
            wait(work, self._timeout, f"{self._what} of micro-batch {micro_batch}", self._device)
        self._post(self._ahead)
        return tensors


Recv = Callable[[int], Tensors]
"""Returns one micro-batch's tensors, as ``RecvQueue.recv`` does."""

_METADATA = -1
"""The micro-batch of metadata between two cells of a stage."""

LocalMessages = dict[tuple[int, int, int], Tensors]
"""Tensors from one cell of a stage to another, not received yet, by (source, target, micro-batch)."""


class P2PCommunicator:
    """The messages of one cell with other cells. Peers are cells."""

    def __init__(
        self,
        coord: RankCoord,
        groups: ProcessGroups,
        device: torch.device,
        timeout: MessageTimeout,
        local: LocalMessages,
        virtual_stage: int,
        flow: FlowControl,
    ) -> None:
        """All cells of a stage share ``local``; ``flow`` says what is posted when."""
        self.coord, self.groups, self.device, self.timeout = coord, groups, device, timeout
        self._local, self._placement, self._flow = local, coord.placement, flow
        self.cell = self._placement.cell_of(virtual_stage, coord.stage)
        self._sends: dict[int, InflightSends] = {}
        self._encoder, self._decoder = MetadataCodec(), MetadataCodec()

    def send_metadata(self, metadata: BoundaryMetadata, names: Sequence[str]) -> None:
        """Sends the next cell the metadata of this mini-batch; ``names`` are the model's skips."""
        vector = self._encoder.encode(metadata, names)
        if self._is_local(self.cell + 1):
            self._local[self.cell, self.cell + 1, _METADATA] = (vector,)
            return
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0], begin = vector.numel(), vector[: _HEADER - 1]
        header[1 : 1 + begin.numel()] = begin
        tensors = header, vector[_HEADER - 1 :]
        self._send(tensors, self.cell + 1, self._group("activations", self.cell + 1), 0, "the metadata")

    def recv_metadata(self, names: Sequence[str]) -> BoundaryMetadata:
        """Returns the previous cell's metadata. Raises StallError when it does not arrive in time."""
        peer, what = self.cell - 1, f"the metadata of {self._describe(self.cell - 1)}"
        if self._is_local(peer):
            return self._decoder.decode(self._local.pop((peer, self.cell, _METADATA))[0], names)
        source, group = self._rank(peer), self._group("activations", peer)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        recv_into(header, source, group, 0, self.timeout, what)
        rest = torch.zeros(max(0, int(header[0]) - (_HEADER - 1)), dtype=torch.int64)
        if rest.numel():
            recv_into(rest, source, group, 1, self.timeout, what)
        return self._decoder.decode(torch.cat((header[1:], rest)), names)

    def post_recvs(self, kind: MessageKind, messages: Sequence[tuple[int, CellBoundary]], step: int) -> Recv:
        """Posts receives for these micro-batches; returns what receives one, from all cells in the boundary's order."""
        peers = {i: boundary.peers_of(kind) for i, boundary in messages}
        expected: dict[int, list[tuple[int, list[TensorSpec]]]] = {}
        for i, boundary in messages:
            for peer, indices in peers[i]:
                expected.setdefault(peer, []).append((i, [boundary.tensors[at] for at in indices]))
        recv_from = {peer: self._recv_from(peer, kind, specs, step) for peer, specs in expected.items()}

        def recv(micro_batch: int) -> Tensors:
            tensors: dict[int, Tensor] = {}
            for peer, indices in peers[micro_batch]:
                tensors.update(zip(indices, recv_from[peer](micro_batch), strict=True))
            return tuple(tensors[at] for at in sorted(tensors))

        return recv

    def _recv_from(
        self, peer: int, kind: MessageKind, messages: Sequence[tuple[int, list[TensorSpec]]], step: int
    ) -> Recv:
        if self._is_local(peer):
            return lambda micro_batch: self._local.pop((peer, self.cell, micro_batch))
        what = f"the {kind} from {self._describe(peer)}"
        ahead = self._flow.recvs_ahead(1 if kind == "activations" else -1)
        return RecvQueue(
            self._rank(peer), self._group(kind, peer), messages, step, self.device, self.timeout, what, ahead
        ).recv

    def send(
        self, kind: MessageKind, tensors: Sequence[Tensor], boundary: CellBoundary, micro_batch: int, step: int
    ) -> None:
        """Sends one micro-batch's tensors, each to its cell, without waiting for delivery: activations, or gradients of
        those that need one, in their order."""
        numbers = [at for at, spec in enumerate(boundary.tensors) if kind == "activations" or spec.needs_gradient]
        by_number = dict(zip(numbers, tensors, strict=True))
        for peer, indices in boundary.peers_of(kind):
            specs, parts = [boundary.tensors[at] for at in indices], [by_number[at].detach() for at in indices]
            if self._is_local(peer):
                laid_out = (part.contiguous(memory_format=spec.layout) for part, spec in zip(parts, specs, strict=True))
                self._local[self.cell, peer, micro_batch] = tuple(laid_out)
                continue
            what = f"the {kind} of micro-batch {micro_batch}"
            self._send(pack(parts, specs), peer, self._group(kind, peer), _tag(step, micro_batch, 0), what)

    def wait_for_sends(self) -> None:
        """Waits until all sends are complete, so that their memory is free."""
        assert not self._local, f"tensors between cells of this stage were not received: {sorted(self._local)}"
        for sends in self._sends.values():
            sends.wait_until(at_most=0)

    def _send(self, tensors: Sequence[Tensor], peer: int, group: Group, tag: int, what: str) -> None:
        distance = abs(peer - self.cell)
        sends = self._sends.setdefault(0 if distance == 1 else peer - self.cell, InflightSends(self.timeout))
        sends.post(tensors, self._rank(peer), group, tag, f"{what} to be received by their target stage")
        sends.wait_until(at_most=self._flow.max_sends_to(distance))

    def _rank(self, peer: int) -> int:
        return self.coord.rank_of(self.coord.replica, self._placement.stage_of(peer))

    def _group(self, kind: MessageKind, peer: int) -> Group:
        groups: tuple[Group, ...] = getattr(self.groups, kind)
        return groups[self.groups.p2p_group_index[min(self.cell, peer), max(self.cell, peer)]]

    def _is_local(self, peer: int) -> bool:
        return not self._placement.crosses(peer, self.cell)

    def _describe(self, peer: int) -> str:
        virtual_stage = self._placement.virtual_stage_of(peer)
        cell = f", its cell {virtual_stage}" if virtual_stage or self.cell >= self.coord.stages else ""
        return f"stage {self._placement.stage_of(peer)}{cell}"


def _tag(step: int, micro_batch: int, tensor: int) -> int:
    """Returns a tag for (step, micro-batch, tensor) above the two of metadata; pair and direction have own groups."""
    assert tensor < _MAX_TENSORS_PER_MESSAGE, f"more than {_MAX_TENSORS_PER_MESSAGE} tensors in one boundary"
    return 2 + tensor + _MAX_TENSORS_PER_MESSAGE * (micro_batch % 4096 + 4096 * (step % 1024))
