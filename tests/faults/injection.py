"""Injects planned faults into workers: wraps a worker's parts from outside.

    GPIPE_WORKER_HOOK='tests/faults/injection.py:inject[[{"fault": "kill", "stage": 1, "step": 3, "action": "B2"}]]'

    kill, stop, exit   the process, by SIGKILL, SIGSTOP, exit code 1
    raise, sleep       in the main thread; with ``layer`` in its forward
    delay              of each message, 0 to ``seconds`` at random
    nan                the loss, without its gradient

``action`` is F2, R2, I2, B2, W2 and so on, or update, validate, save, start.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from launch.worker.attempt import Attempt
from suite.errors import SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.p2p import P2PCommunicator
from suite.pipeline.runtime.stage import CellMicroBatch, Stage
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.settings import FrozenRecord

VARIABLE = "GPIPE_WORKER_HOOK"


def hook(faults: Sequence[Mapping[str, Any]]) -> str:
    """Returns the value of the variable for a plan; empty without faults."""
    return f"{Path(__file__).resolve()}:inject[{json.dumps(faults)}]" if faults else ""


class InjectedError(Exception):
    """An exception that a plan requests."""


class Fault(FrozenRecord):
    """One planned fault; a field that is None matches everything."""

    fault: Literal["kill", "stop", "exit", "raise", "sleep", "delay", "nan"]
    attempt: int | None = 1
    replica: int | None = None
    stage: int | None = None
    step: int | None = None
    action: str | None = None
    layer: int | None = None
    """Of raise and sleep: not at the start of the action but when it reaches this layer."""
    seconds: float = 86400.0
    """Duration of a sleep, or the longest delay of a message."""


def parse_faults(plan: str) -> list[Fault]:
    """Returns the faults of a plan. Raises SettingError for an invalid one."""
    try:
        return TypeAdapter(list[Fault]).validate_json(plan)
    except ValidationError as error:
        message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise SettingError(f"{VARIABLE} holds no plan of faults: {message}") from None


def inject(plan: str, coord: RankCoord, attempt: Attempt, status: WorkerStatus) -> None:
    """Prepares the planned faults of one attempt of this worker, and injects those at ``start``.

    It is called before the worker is assembled; the stage is found through ``status``. Raises SettingError for an
    invalid plan.
    """
    faults = [
        fault
        for fault in parse_faults(plan)
        if fault.attempt in (None, attempt.number)
        and fault.replica in (None, coord.replica)
        and fault.stage in (None, coord.stage)
    ]
    if not faults:
        return
    delays = [fault.seconds for fault in faults if fault.fault == "delay"]
    if delays:
        _delay_sends(max(delays), random.Random(coord.rank))
    _FaultInjector(faults, status).wrap_begin()
    status.begin("start", None)


def _delay_sends(max_delay_s: float, generator: random.Random) -> None:
    """Delays each message of this process by a random time."""
    send = P2PCommunicator._send

    def delayed_send(*args: Any) -> None:
        time.sleep(generator.uniform(0.0, max_delay_s))
        send(*args)

    P2PCommunicator._send = delayed_send  # type: ignore[assignment, method-assign]  # one worker per process


class _FaultInjector:
    """The faults of one worker in one attempt except delays; each is injected once, except nan."""

    def __init__(self, faults: Sequence[Fault], status: WorkerStatus) -> None:
        self._pending = [fault for fault in faults if fault.fault not in ("delay", "nan")]
        self._corruptions = [fault for fault in faults if fault.fault == "nan"]
        self._status = status

    def wrap_begin(self) -> None:
        """Makes faults strike after the status has recorded the action; hooks the stage once it is built."""
        begin = self._status.begin

        def begin_with_faults(what: Action | str, step: int | None) -> None:
            begin(what, step)
            stage = self._status.stage
            while stage is not None and self._corruptions:
                self._corrupt_loss(self._corruptions.pop(0), stage)
            for fault in [fault for fault in self._pending if self._matches(fault)]:
                self._pending.remove(fault)
                # tests read the time; flushed because the process may end right now
                with suppress(OSError):
                    print(
                        f"fault {fault.fault} at {what} of step {step}, {time.time():.3f}", file=sys.stderr, flush=True
                    )
                if fault.layer is None:
                    self._inject(fault)
                else:
                    assert stage is not None, "the stage has no layers yet"
                    self._inject_before(fault, stage.by_index[fault.layer])

        self._status.begin = begin_with_faults  # type: ignore[method-assign]

    def _matches(self, fault: Fault) -> bool:
        """Whether a fault is planned for the current action."""
        return fault.action in (None, str(self._status.action)) and fault.step in (None, self._status.step)

    def _inject(self, fault: Fault) -> None:
        if fault.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.fault == "exit":
            os._exit(1)
        elif fault.fault == "raise":
            raise InjectedError("a planned exception")
        elif fault.fault == "sleep":
            time.sleep(fault.seconds)

    def _inject_before(self, fault: Fault, layer: nn.Module) -> None:
        def once(*_: Any) -> None:
            handle.remove()
            self._inject(fault)

        handle = layer.register_forward_pre_hook(once)

    def _corrupt_loss(self, fault: Fault, stage: Stage) -> None:
        """Corrupts the value of the objective, but not its gradient. No module returns it if the last layer has
        ``score``, so the stage's forward is wrapped."""
        forward = stage.forward

        def corrupted_forward(micro_batch: CellMicroBatch, targets: Tensors = ()) -> tuple[Tensors, Tensor | None]:
            outputs, metric = forward(micro_batch, targets)
            if metric is not None and self._matches(fault):
                outputs = (outputs[0] + outputs[0].detach() * math.nan,)
            return outputs, metric

        stage.forward = corrupted_forward  # type: ignore[method-assign]
