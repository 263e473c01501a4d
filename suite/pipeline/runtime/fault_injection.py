"""Injects the faults of a test's plan into workers. Without a plan there are no hooks.

    GPIPE_FAULTS='[{"fault": "kill", "stage": 1, "step": 3, "action": "B2"}]'       or the name of a file that holds it

    kill, stop, exit   the process, by SIGKILL, SIGSTOP, exit code 1
    raise, sleep       in the main thread; with ``layer`` in its forward
    delay              of each message, 0 to ``seconds`` at random
    nan, inf           a layer's output, the gradient of its input, or the loss
    full               no file can grow beyond ``bytes`` from then on
    torn               truncates the newest checkpoint's newest file to half, and kills the process

``action`` is F2, R2, I2, B2, W2 and so on, or update, save, start.
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
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import RankCoord
from suite.settings import Frozen

VARIABLE = "GPIPE_FAULTS"


class InjectedError(Exception):
    """An exception that a plan requests."""


class Fault(Frozen):
    """One planned fault; a field that is None matches everything."""

    fault: Literal["kill", "stop", "exit", "raise", "sleep", "delay", "nan", "inf", "full", "torn"]
    attempt: int | None = 1
    replica: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    """Of raise and sleep: not at the start of the action but when it reaches this layer. Of nan and inf: the layer
    whose output or gradient is corrupted. The last layer cannot be used: ``score`` replaces its forward."""
    of: Literal["activation", "gradient", "loss"] = "activation"
    """What nan and inf corrupt."""
    seconds: float = 86400.0
    """Duration of a sleep, or the longest delay of a message."""
    bytes: int = 0

    @model_validator(mode="after")
    def _names_its_layer(self) -> Fault:
        if self.fault in ("nan", "inf") and self.of != "loss" and self.layer is None:
            raise ValueError(f"{self.fault} of {self.of} needs a layer")
        return self


def plan_text() -> str:
    """Returns the plan in GPIPE_FAULTS or in the file that it names; empty without one."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text or text.startswith("["):
        return text
    try:
        return Path(text).read_text()
    except OSError as error:
        raise SettingError(f"{VARIABLE} is neither a list of faults nor a file of one: {error}") from None


def read_plan(text: str) -> list[Fault]:
    """Returns the faults of a plan. Raises SettingError for an invalid one."""
    try:
        return TypeAdapter(list[Fault]).validate_json(text)
    except ValidationError as error:
        message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise SettingError(f"{VARIABLE} holds no plan of faults: {message}") from None


def planned_faults(text: str, coord: RankCoord, attempt: int, checkpoints: Path) -> FaultInjector | None:
    """Returns the injector of a worker's faults, or None. Raises SettingError for an invalid plan."""
    if not text:
        return None
    faults = [
        fault
        for fault in read_plan(text)
        if fault.attempt in (None, attempt)
        and fault.replica in (None, coord.replica)
        and fault.stage in (None, coord.stage)
    ]
    return FaultInjector(faults, coord, checkpoints) if faults else None


class FaultInjector:
    """The faults of one worker in one attempt; each is injected once, except delays, nan and inf."""

    def __init__(self, plan: Sequence[Fault], coord: RankCoord, checkpoints: Path) -> None:
        self._pending = [fault for fault in plan if fault.fault not in ("delay", "nan", "inf")]
        self._corruptions = [fault for fault in plan if fault.fault in ("nan", "inf")]
        delays = [fault.seconds for fault in plan if fault.fault == "delay"]
        self.latest = max(delays, default=0.0)
        """The longest delay of a message, in seconds."""
        self._layers: Mapping[int, nn.Module] = {}
        self._now: tuple[str, int | None] = ("start", None)
        self._checkpoints = checkpoints
        self._random = random.Random(coord.rank)

    def arm(self, layers: Mapping[int, nn.Module]) -> None:
        """Sets the layers of the stage and installs the hooks on them."""
        self._layers = layers
        for fault in self._corruptions:
            if fault.layer is not None and fault.layer in layers:
                self._install_hook(fault, layers[fault.layer])

    def _install_hook(self, fault: Fault, layer: nn.Module) -> None:
        def on_output(module: nn.Module, inputs: Tensors, output: Tensor | Tensors) -> Tensor | Tensors | None:
            if not _matches(fault, *self._now):
                return None
            return (
                _corrupted(output, fault)
                if isinstance(output, Tensor)
                else tuple(_corrupted(tensor, fault) for tensor in output)
            )

        def on_input(module: nn.Module, inputs: Tensors) -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda grad: _corrupted(grad, fault) if _matches(fault, *self._now) else None)

        if fault.of == "activation":
            layer.register_forward_hook(on_output)
        else:
            layer.register_forward_pre_hook(on_input)

    def strike(self, action: str, step: int | None) -> None:
        """Injects the faults planned for an action."""
        self._now = action, step
        for fault in [fault for fault in self._pending if _matches(fault, action, step)]:
            self._pending.remove(fault)
            # tests read the time; flushed because the process may end right now
            with suppress(OSError):
                print(f"fault {fault.fault} at {action} of step {step}, {time.time():.3f}", file=sys.stderr, flush=True)
            if fault.layer is None:
                self._inject(fault)
            else:
                self._inject_at_layer(fault, fault.layer)

    def _inject(self, fault: Fault) -> None:
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
            raise InjectedError("a planned exception")
        elif fault.fault == "sleep":
            time.sleep(fault.seconds)
        elif fault.fault == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail as on a full disk, without killing the process
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _inject_at_layer(self, fault: Fault, layer: int) -> None:
        def once(*_: Any) -> None:
            handle.remove()
            self._inject(fault)

        handle = self._layers[layer].register_forward_pre_hook(once)

    def delay_message(self) -> None:
        """Delays a message before it is sent."""
        if self.latest:
            time.sleep(self._random.uniform(0.0, self.latest))

    def spoil_loss(self, objective: Tensor) -> Tensor:
        """Returns a micro-batch's objective, corrupted if that is planned."""
        for fault in self._corruptions:
            if fault.of == "loss" and _matches(fault, *self._now):
                objective = _corrupted(objective, fault)
        return objective


def _corrupted(tensor: Tensor, fault: Fault) -> Tensor:
    return tensor * (math.nan if fault.fault == "nan" else math.inf) if tensor.is_floating_point() else tensor


def _matches(fault: Fault, action: str, step: int | None) -> bool:
    return fault.action in (None, action) and fault.step in (None, step)
