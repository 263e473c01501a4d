"""Faults that a test plans: who is struck, where, with what. Read by one hook; without a plan there is no hook.

    GPIPE_FAULTS='[{"fault": "kill", "stage": 1, "step": 3, "action": "B2"}]'       or the name of a file that holds it

    kill, stop, exit   the process, by SIGKILL, SIGSTOP, exit code 1
    raise, sleep       in the main thread; with ``layer`` in its forward
    delay              of each message, 0 to ``seconds`` at random
    nan, inf           a layer's output, the gradient of its input, or the loss
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError, model_validator
from torch import Tensor, nn

from suite.errors import SettingError
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
    """Of raise and sleep: not at the action's begin but where it comes to this layer. Of nan and inf: the layer whose
    output or gradient is spoiled. The last one's forward is done in parts and is never struck."""
    of: Literal["activation", "gradient", "loss"] = "activation"
    """What nan and inf spoil."""
    seconds: float = 86400.0
    """How long a sleep is, how late the latest message."""
    bytes: int = 0

    @model_validator(mode="after")
    def _names_its_layer(self) -> Fault:
        if self.fault in ("nan", "inf") and self.of != "loss" and self.layer is None:
            raise ValueError(f"{self.fault} of {self.of} needs a layer")
        return self


def plan_text() -> str:
    """Returns the plan of GPIPE_FAULTS, which may be a file's name; empty without one."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text or text.startswith("["):
        return text
    try:
        return Path(text).read_text()
    except OSError as error:
        raise SettingError(f"{VARIABLE} is neither a list of faults nor a file of one: {error}") from None


def read_plan(text: str) -> list[Fault]:
    """Returns the faults of a plan. Raises SettingError for what is none."""
    try:
        return TypeAdapter(list[Fault]).validate_json(text)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise SettingError(f"{VARIABLE} holds no plan of faults: {told}") from None


def planned(text: str, place: Place, attempt: int, checkpoints: Path) -> Faults | None:
    """Returns what a plan has for a worker, or None. Raises SettingError for what is no plan."""
    if not text:
        return None
    mine = [
        fault
        for fault in read_plan(text)
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
        self._layers: Mapping[int, nn.Module] = {}
        self._now: tuple[str, int | None] = ("start", None)
        self._checkpoints = checkpoints
        self._random = random.Random(place.rank)

    def arm(self, layers: Mapping[int, nn.Module]) -> None:
        """Takes the layers of the stage, once it stands, which may be struck themselves."""
        self._layers = layers
        for fault in self._spoils:
            if fault.layer is not None and fault.layer in layers:
                self._arm(fault, layers[fault.layer])

    def _arm(self, fault: Fault, layer: nn.Module) -> None:
        def on_output(module: nn.Module, inputs: Tensors, output: Tensor | Tensors) -> Tensor | Tensors | None:
            if not _meant(fault, *self._now):
                return None
            return _times(output, fault) if isinstance(output, Tensor) else tuple(_times(one, fault) for one in output)

        def on_input(module: nn.Module, inputs: Tensors) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda grad: _times(grad, fault) if _meant(fault, *self._now) else None)

        if fault.of == "activation":
            layer.register_forward_hook(on_output)
        else:
            layer.register_forward_pre_hook(on_input)

    def strike(self, action: str, step: int | None) -> None:
        """Carries out what is planned for an action."""
        self._now = action, step
        for fault in [fault for fault in self._left if _meant(fault, action, step)]:
            self._left.remove(fault)
            # a test reads when it was; the log is flushed because the process may have no later
            with suppress(OSError):
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

        handle = self._layers[layer].register_forward_pre_hook(once)

    def late(self) -> None:
        """Holds up a message that is about to be sent."""
        if self.latest:
            time.sleep(self._random.uniform(0.0, self.latest))

    def spoil_loss(self, objective: Tensor) -> Tensor:
        """Returns a micro-batch's objective, or what is planned in its place."""
        for fault in self._spoils:
            if fault.of == "loss" and _meant(fault, *self._now):
                objective = _times(objective, fault)
        return objective


def _times(tensor: Tensor, fault: Fault) -> Tensor:
    return tensor * (math.nan if fault.fault == "nan" else math.inf) if tensor.is_floating_point() else tensor


def _meant(fault: Fault, action: str, step: int | None) -> bool:
    return fault.action in (None, action) and fault.step in (None, step)
