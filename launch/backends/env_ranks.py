"""The ranks that somebody else has started, one for each worker: LAUNCHER=env by torchrun or srun, with RANK and
WORLD_SIZE; ``launch.train_loop`` by a TorchTrainer of Ray Train.

    rank 0      plans, supervises, prints, runs worker 0     --- <n>: the n-th attempt, <n>/over -->
    rank r      waits for attempts, runs worker r of each    <-- <n>/<r>: its heartbeat, and how it ended

They meet in a torch.distributed store, with LAUNCHER=env that of MASTER_ADDR and MASTER_PORT, and send JSON. A worker
is a child process: its end is reported and restarted as with any other launcher. A rank that is lost ends the run.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.distributed import DistError, rendezvous  # type: ignore[attr-defined]

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from launch import interrupts
from launch.backends.backend import Backend
from launch.backends.network_interface import use_interface_of
from launch.backends.processes import run_worker_alone
from launch.supervision.supervisor import Launcher
from launch.supervision.watchdog import FIRST_HEARTBEAT_S, Watchdog
from launch.worker.attempt import Attempt
from launch.worker.heartbeat import parse_heartbeat
from launch.worker.save_requests import END_FILE
from suite import errors
from suite.errors import FailureLocation, PlacementError, SettingError, SuiteError, WorkerDiedError, WorkerError
from suite.pipeline.planning.placement import Node, Placement

VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""Set by torchrun, and by srun."""

JOIN_S = 600.0
"""Seconds for all ranks to start."""

POLL_S = 0.25

LOST_S = FIRST_HEARTBEAT_S
"""A rank whose status has not changed for so many seconds is lost."""

END_S = 5.0
"""Seconds for the ranks to see the end, after which torchrun kills those that are left."""

_ATTEMPT = TypeAdapter(Attempt)


@dataclass(frozen=True)
class Ranks:
    """This process among those of the command."""

    rank: int
    world: int
    local_rank: int
    store: Any
    address: str
    """Of the store, "host port"."""
    preload: Sequence[str] = ()
    """What the forkserver of a worker imports besides its own."""

    @staticmethod
    def join() -> Ranks:
        """Waits for all ranks. Raises SettingError without the variables, PlacementError if some do not come."""
        for name, of_slurm in VARIABLES.items():
            os.environ.setdefault(name, os.environ.get(of_slurm, ""))
        if missing := [name for name in (*VARIABLES, "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
            raise SettingError(
                f"LAUNCHER=env reads {', '.join(missing)} from the environment; start the command with torchrun, or "
                "with srun and MASTER_ADDR and MASTER_PORT (docs/platforms.md)"
            )
        host, port, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
        try:
            store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_S))))
            local = int(os.environ["LOCAL_RANK"])
        except (RuntimeError, ValueError) as error:
            raise PlacementError(f"the {size} processes did not meet at {host}:{port}: {error}") from None
        return Ranks(rank, world, local, store, f"{host} {port}")

    def run_worker(self, number: int, attempt: Attempt, should_stop: Callable[[], bool]) -> SuiteError | None:
        """Runs this rank's worker of an attempt; returns how it failed."""
        host, port = self.address.split()
        kind, _, _, _, store_at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as route:
            route.connect(store_at)  # sends nothing
            use_interface_of(route.getsockname()[0])
        if _ranks_per_node(self.world) < self.world:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "")  # that of the host name, instead of loopback
        prefix = f"workers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{number}"
        # srun may show each process its own GPU alone
        device = None if not attempt.use_gpu else 0 if torch.cuda.device_count() == 1 else self.local_rank
        node = socket.gethostname()
        return run_worker_alone(self.rank, self.address, prefix, attempt, device, node, should_stop, self.preload)

    def serve(self) -> int:
        """Runs the worker of this rank in each attempt of rank 0; returns the command's exit code. Raises
        PlacementError when rank 0, which has the store, is lost."""
        try:
            return self._serve()
        except DistError:
            raise PlacementError(f"rank 0 is lost, at {self.address}; start all again, with gpipe resume") from None

    def _serve(self) -> int:
        asked, leave_at = threading.Event(), math.inf
        for number in count():
            while not self.store.check([str(number)]):
                if self.store.check(["end"]):
                    interrupts.ignore()
                    self.store.add("ended", 1)
                    return int(self.store.get("end"))
                if time.monotonic() > leave_at:
                    raise interrupts.interrupted()
                time.sleep(POLL_S)
            with TemporaryDirectory(prefix="gpipe-heartbeats-", ignore_cleanup_errors=True) as folder:
                self._serve_attempt(number, Path(folder), asked)
            leave_at = time.monotonic() + END_S if asked.is_set() else math.inf
        raise AssertionError

    def _serve_attempt(self, number: int, folder: Path, asked: threading.Event) -> None:
        """``asked`` is set when this rank gets SIGTERM, as all ranks do from torchrun and srun."""
        attempt, signs, due = _ATTEMPT.validate_json(self.store.get(str(number))), count(), 0.0

        def send(ended: bool = False, error: SuiteError | None = None) -> None:
            heartbeat = "".join(path.read_text("utf-8", "replace") for path in folder.glob("*.json"))
            report = None if error is None else [type(error).__name__, error.args]
            self.store.set(f"{number}/{self.rank}", json.dumps([next(signs), heartbeat, ended, report], default=asdict))

        def is_over() -> bool:
            nonlocal due
            if time.monotonic() < due:
                return False
            due = time.monotonic() + POLL_S
            send()
            if asked.is_set():
                (folder / END_FILE).touch()
            return bool(self.store.check([f"{number}/over"]))

        def trains() -> bool:
            heartbeats = (parse_heartbeat(path.read_bytes(), attempt.number) for path in folder.glob("*.json"))
            return any(heartbeat is not None and heartbeat.steps_done for heartbeat in heartbeats)

        if attempt.folder.is_dir():
            own = replace(attempt, heartbeats=folder, working_dir=None)  # torchrun or srun has chosen this rank's
            with interrupts.first_sigterm(asked, trains):
                failed = self.run_worker(number, own, is_over)
        else:
            failed = SettingError(
                f"{socket.gethostname()} has no folder {attempt.folder}; start the command where all nodes share it"
            )
        send(ended=True, error=failed)


def run_command(launcher: str, command: Callable[[], object]) -> None:
    """Runs a command; with the launcher ``env`` on rank 0 alone, and the other ranks run its workers. Raises SystemExit
    with the exit code of rank 0 on the others."""
    if launcher != "env":
        command()
    elif (ranks := Ranks.join()).rank:
        raise SystemExit(ranks.serve())
    else:
        lead(ranks, command)


def lead(ranks: Ranks, command: Callable[[], object]) -> None:
    """Runs a command on rank 0, while all other ranks ``serve``; ends them with its exit code."""
    EnvBackend.ranks, EnvBackend.workers, code = ranks, ranks.world, 1
    try:
        command()
        code = 0
    except SuiteError:
        code = 2
        raise
    except KeyboardInterrupt:
        code = interrupts.exit_code()
        raise
    finally:
        interrupts.ignore()  # torchrun sends one to all as soon as the first rank has failed
        ranks.store.set("end", str(code))
        until = time.monotonic() + END_S
        while ranks.store.add("ended", 0) < ranks.world - 1 and time.monotonic() < until:
            time.sleep(0.01)


def _ranks_per_node(world: int) -> int:
    """Raises SettingError when the nodes do not have equally many."""
    given, nodes = os.environ.get("LOCAL_WORLD_SIZE"), int(os.environ.get("SLURM_NNODES") or 1)
    local = int(given or max(1, world // nodes))
    if world % local or not (given or world == nodes * local):
        where = f"{local} of them are on this node" if given else f"they are on {nodes} nodes"
        raise SettingError(f"WORLD_SIZE is {world}, and {where}; start equally many on each")
    return local


class EnvBackend(Backend):
    """The machines of the ranks, taken to be like this one."""

    ranks: Ranks

    def cluster(self) -> Cluster:
        """At least a device for each rank."""
        here, world = super().cluster(), self.ranks.world
        local = _ranks_per_node(world)
        machines = world // local if local < world else 0
        nodes = tuple(Node(str(at), f"node {at}", local, local) for at in range(machines))
        return replace(here, devices=world if nodes else max(here.devices, world), nodes=nodes)

    def check_workers(self, experiment: Experiment) -> None:
        workers = experiment.pipeline.stages * experiment.pipeline.replicas
        if workers != self.ranks.world:
            raise SettingError(
                f"K x R is {workers} workers, and WORLD_SIZE is {self.ranks.world} processes; start {workers} of them, "
                "or set pipeline.stages and pipeline.replicas"
            )

    def open_launcher(self, attempt: Attempt, planned: Placement | None) -> AbstractContextManager[Launcher]:
        return nullcontext(RankLauncher(self.ranks))


@dataclass
class RankLauncher:
    """Runs attempts on all ranks, from rank 0."""

    ranks: Ranks
    lost: int | None = None
    _numbers: Any = field(default_factory=count)

    def run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> None:
        """Runs one attempt, until it ends, or a worker fails, or the watchdog has a verdict."""
        attempt = replace(attempt, local_workers=_ranks_per_node(self.ranks.world))
        store, number, others = self.ranks.store, next(self._numbers), range(1, self.ranks.world)
        keys = [f"{number}/{rank}" for rank in others]
        for key in keys:
            store.set(key, json.dumps([-1, "", False, None]))
        store.set(str(number), _ATTEMPT.dump_json(attempt))
        seen, running, due = dict.fromkeys(others, (-1, time.monotonic())), set(others), 0.0
        failure: SuiteError | None = None

        def poll() -> None:
            nonlocal due, failure
            if not keys or time.monotonic() < due:
                return
            due = time.monotonic() + POLL_S
            for rank, text in zip(others, store.multi_get(keys), strict=True):
                sign, heartbeat, ended, error = json.loads(text)
                watchdog.receive({rank: heartbeat.encode()})
                if sign != seen[rank][0]:
                    seen[rank] = (sign, time.monotonic())
                elif rank in running and time.monotonic() > seen[rank][1] + LOST_S:
                    self.lost, ended = rank, True
                    failure = failure or WorkerDiedError(rank, f"its rank was silent for {LOST_S:.0f} s", "node")
                if ended:
                    running.discard(rank)
                failure = failure or _decoded(error)

        def is_over() -> bool:
            poll()
            return failure is not None or watchdog.should_stop

        try:
            own = self.ranks.run_worker(number, attempt, is_over)
            while own is None and running and not is_over():
                time.sleep(POLL_S)
        finally:
            store.set(f"{number}/over", "")
        first = failure or own
        if first is None and watchdog.should_stop:
            first = WorkerError("the workers were ended")
        while running and not watchdog.ends_early.is_set():
            poll()
            time.sleep(POLL_S)
        if first is not None:
            raise first

    def available_devices(self, workers: int) -> int:
        """Returns ``workers``. Raises PlacementError when a rank is lost: only torchrun or srun can start it again."""
        if self.lost is not None:
            raise PlacementError(f"rank {self.lost} of {self.ranks.world} is lost; start all again, with gpipe resume")
        return workers

    def leave_out(self, rank: int) -> str:
        """Returns nothing: torchrun or srun has chosen the nodes."""
        return ""


def _decoded(error: Any) -> SuiteError | None:
    if error is None:
        return None
    name, parts = error
    parts = [FailureLocation(**part) if isinstance(part, dict) else part for part in parts]
    kind = getattr(errors, name, WorkerError)
    return kind(*parts) if isinstance(kind, type) and issubclass(kind, SuiteError) else WorkerError(name)
