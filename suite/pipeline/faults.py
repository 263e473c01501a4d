"""Faults that a test plans: who is struck, where, with what. Read by one hook; without a plan there is no hook.

    GPIPE_FAULTS='[{"fault": "kill", "stage": 1, "step": 3, "action": "B2"}]'       or the name of a file that holds it

    kill, stop, exit   the process, by SIGKILL, SIGSTOP, exit code 1
    raise, sleep       in the main thread; with ``layer`` in its forward
    delay              of each message, 0 to ``seconds`` at random
    nan, inf           an activation, a gradient or the loss
    full               no file can grow beyond ``bytes`` from here on
    torn               half of the newest checkpoint's newest file is cut off, and the process killed

``action`` is F2, R2, B2 and so on, or update, save, start.
"""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import Tensor, nn

from suite.pipeline.layers import Tensors
from suite.pipeline.topology import Place
from suite.settings import Frozen

VARIABLE = "GPIPE_FAULTS"


class PlannedError(Exception):
    """An exception that a plan asked for."""


class Fault(Frozen):
    """One planned fault; a field that is None matches everything."""

    fault: Literal["kill", "stop", "exit", "raise", "sleep", "delay", "nan", "inf", "full", "torn"]
    attempt: int | None = 1
    replica: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    """Of raise and sleep: not at the action's begin but where it comes to this layer. The last one's forward is done in
    parts and is never struck."""
    of: Literal["activation", "gradient", "loss"] = "activation"
    """What nan and inf spoil: what leaves a forward, what comes to a backward, the loss."""
    seconds: float = 86400.0
    """How long a sleep is, how late the latest message."""
    bytes: int = 0


def plan_text() -> str:
    """Returns the plan of GPIPE_FAULTS, which may be a file's name; empty without one."""
    text = os.environ.get(VARIABLE, "").strip()
    return Path(text).read_text() if text and not text.startswith("[") else text


def planned(text: str, place: Place, attempt: int, checkpoints: Path) -> Faults | None:
    """Returns what a plan has for a worker, or None. Raises pydantic's ValidationError for what is no plan."""
    if not text:
        return None
    plan = TypeAdapter(list[Fault]).validate_json(text)
    mine = [
        fault
        for fault in plan
        if fault.attempt in (None, attempt)
        and fault.replica in (None, place.replica)
        and fault.stage in (None, place.stage)
    ]
    return Faults(mine, place, checkpoints) if mine else None


class Faults:
    """The faults of one worker in one attempt; each strikes once, but a delay always."""

    def __init__(self, plan: Sequence[Fault], place: Place, checkpoints: Path) -> None:
        self._left = [fault for fault in plan if fault.fault not in ("delay", "nan", "inf")]
        self._spoils = [fault for fault in plan if fault.fault in ("nan", "inf")]
        late = [fault.seconds for fault in plan if fault.fault == "delay"]
        self.latest = max(late, default=0.0)
        """Seconds that a message may be late."""
        self.layers: dict[int, nn.Module] = {}
        """Those of the stage, once it stands."""
        self._checkpoints = checkpoints
        self._random = random.Random(place.rank)

    def strike(self, action: str, step: int | None) -> None:
        """Carries out what is planned for an action."""
        for fault in [fault for fault in self._left if _meant(fault, action, step)]:
            self._left.remove(fault)
            # a test reads when it was; the log is flushed because the process may have no later
            print(f"fault {fault.fault} at {action} of step {step}, {time.time():.3f}", file=sys.stderr, flush=True)
            if fault.layer is None:
                self._do(fault)
            else:
                self._at_layer(fault, fault.layer)

    def _do(self, fault: Fault) -> None:
        if fault.fault == "torn":
            files = self._checkpoints.glob("[0-9]*/*.safetensors")
            newest = max(files, key=lambda path: (path.parent.name, path.stat().st_mtime_ns))
            os.truncate(newest, newest.stat().st_size // 2)
        if fault.fault in ("kill", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.fault == "exit":
            os._exit(1)
        elif fault.fault == "raise":
            raise PlannedError("a planned exception")
        elif fault.fault == "sleep":
            time.sleep(fault.seconds)
        elif fault.fault == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails, as on a full disk, and kills nobody
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _at_layer(self, fault: Fault, layer: int) -> None:
        def once(*_: Any) -> None:
            handle.remove()
            self._do(fault)

        handle = self.layers[layer].register_forward_pre_hook(once)

    def late(self) -> None:
        """Holds up a message that is about to be sent."""
        if self.latest:
            time.sleep(self._random.uniform(0.0, self.latest))

    def spoil(self, of: str, action: str, step: int | None, tensors: Tensors) -> Tensors:
        """Returns an action's tensors, or what is planned in their place."""
        for fault in self._spoils:
            if fault.of == of and _meant(fault, action, step):
                factor = math.nan if fault.fault == "nan" else math.inf
                tensors = tuple(_times(tensor, factor) for tensor in tensors)
        return tensors


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor if tensor.is_floating_point() else tensor


def _meant(fault: Fault, action: str, step: int | None) -> bool:
    return fault.action in (None, action) and fault.step in (None, step)
