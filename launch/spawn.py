"""Starts workers as plain processes of this machine, without Ray: for tests, benchmarks and a bare GPU machine."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from suite.errors import DiedError, ForkserverError, NeighbourLostError, SuiteError, WorkerError

if TYPE_CHECKING:  # who only starts processes needs none of these
    from experiments.experiment import Experiment
    from launch.watch import Watch
    from launch.worker import Job

PRELOAD = ["launch.worker", "deepspeed"]
"""Imported once, by the server that workers are forked from: a worker then starts in a tenth of a second."""

PRELOAD_LATE = ["deepspeed.runtime.zero.muon.muon_optimizer"]
"""What DeepSpeed's engine imports on its way, PyTorch's compiler with it: over two seconds of each worker's. Only where
there is no GPU: a process that has asked for one may not be forked, and a compiler may ask."""

FIRST_CAUSE_S = 5.0
"""Seconds that a worker's word of a lost neighbour is held back for that neighbour's own."""


UNKNOWN = 255
"""What multiprocessing gives for an exit code that did not come."""

FORKSERVER_END_S = 1.0
"""Seconds from the end of the forkserver's pipes to its own."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal to be sent to a process when its parent dies."""


def run_processes(
    target: Callable[..., Any], world: int, *args: Any, deadline_s: float = 600.0,
    given_up: Callable[[], bool] = bool, preload: Sequence[str] = (),
) -> list[Any]:  # fmt: skip
    """Runs ``target(rank, world, rendezvous, *args)`` in ``world`` fresh processes; returns their results by rank.

    ``rendezvous`` is a URL for torch.distributed. ``target`` must be importable by name. The first failure ends all
    processes and is raised here: a SuiteError as itself, anything else with its traceback. So does ``given_up``, asked
    now and then, when it says so. The server that processes are forked from imports ``preload`` too, where it is not
    running yet.

    Raises DiedError when a process dies, ForkserverError when the one that starts them does, WorkerError when the
    deadline passes.
    """
    import torch

    preload = [*preload, *PRELOAD]
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed wonders aloud, on standard output
        preload += PRELOAD_LATE
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(preload)
    _start_resource_tracker()
    results: Any = context.Queue()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        processes: list[BaseProcess] = [
            context.Process(target=_call, args=(target, rank, world, rendezvous, results, args))
            for rank in range(world)
        ]
        try:
            _start_server()
            for process in processes:
                process.start()
            return _collect(processes, results, time.monotonic() + deadline_s, given_up)
        finally:
            for process in processes:
                if process.ident is not None:  # it was started, before an interrupt or a failure to start others
                    process.kill()
                    process.join(10)
            results.close()


def _start_resource_tracker() -> None:
    """Starts the process that unlinks the semaphores of killed processes, without its warning that there were some."""
    before = list(sys.warnoptions)
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # the tracker is started with these options
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions[:] = before


def _start_server() -> None:
    """Starts the server that workers are forked from, deaf to SIGINT from its first moment and they with it: a Ctrl-C
    reaches them too, and it is this process that ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _collect(processes: list[BaseProcess], results: Any, until: float, given_up: Callable[[], bool]) -> list[Any]:
    found: dict[int, Any] = {}
    collateral: dict[int, NeighbourLostError] = {}
    while len(found) < len(processes):
        if given_up():
            raise WorkerError("the workers were ended")
        try:
            rank, value, error = results.get(timeout=0.1)
        except queue.Empty:
            told = found.keys() | collateral.keys()
            dead = [rank for rank, p in enumerate(processes) if p.exitcode is not None and rank not in told]
            if dead and results.empty():
                if processes[dead[0]].exitcode == UNKNOWN:
                    _check_forkserver()
                raise DiedError(dead[0], _end(processes[dead[0]])) from None
            if time.monotonic() > until and collateral:
                raise next(iter(collateral.values())) from None
            if time.monotonic() > until:
                late = [rank for rank in range(len(processes)) if rank not in found]
                raise WorkerError(f"workers {late} gave no result in time and were ended") from None
            continue
        if error is not None:
            cause, trace = error
            if isinstance(cause, NeighbourLostError):
                # the worker it lost is about to be found dead, or to say itself what went wrong
                collateral[rank] = cause
                until = min(until, time.monotonic() + FIRST_CAUSE_S)
                continue
            if isinstance(cause, SuiteError):
                raise cause
            raise RuntimeError(f"worker {rank} failed\n{trace}") from cause
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _check_forkserver() -> None:
    """Raises ForkserverError when the server that workers are forked from is gone. Their exit codes come through it,
    and they end with it; the next process that is started starts it anew."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # it has no public name
    until, ended = time.monotonic() + FORKSERVER_END_S, None
    while ended is None and time.monotonic() < until:
        # its exit status is left for whoever starts it anew
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.01)
    if ended is not None:
        killed = ended.si_code != os.CLD_EXITED
        how = f"by {signal.Signals(ended.si_status).name}" if killed else f"with exit code {ended.si_status}"
        raise ForkserverError(
            f"the process that workers are forked from (Python's forkserver, process {pid}) ended {how}, and all "
            "workers with it"
        )


def _end(process: BaseProcess) -> str:
    code = process.exitcode or 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"its process ended {how}"


def _call(
    target: Callable[..., Any], rank: int, world: int, rendezvous: str, results: Any, args: tuple[Any, ...]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _end_with_forkserver()
    try:
        results.put((rank, target(rank, world, rendezvous, *args), None))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            results.put((rank, None, (error if isinstance(error, SuiteError) else None, trace)))
        finally:
            results.close()
            results.join_thread()
        os._exit(1)


def _end_with_parent() -> None:
    """Ends this process with the one that asked for it, also when that was killed and could say nothing."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end_with_forkserver() -> None:
    """Has this process killed when the server dies that it was forked from. Nobody hears of its end any more then, and
    it would go on beside the workers of the next attempt."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Processes:
    """Starts a job's K x R workers as processes of this machine."""

    def run(self, job: Job, experiment: Experiment, watch: Watch) -> None:
        """Runs one attempt, as long as the watch has nothing against it."""
        run(job, experiment, given_up=lambda: watch.ends)

    def room(self, workers: int) -> int:
        """Processes find room where they did before."""
        return workers


def run(
    job: Job, experiment: Experiment, deadline_s: float = 365 * 86400.0, given_up: Callable[[], bool] = bool
) -> None:
    """Runs one attempt without a watch of its own: its end is the caller's to see to."""
    from launch.worker import threads_of

    workers = experiment.pipeline.stages * experiment.pipeline.replicas
    os.environ["OMP_NUM_THREADS"] = str(threads_of(experiment))
    try:
        run_processes(_work, workers, job, deadline_s=deadline_s, given_up=given_up)
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise WorkerError(
            f"a worker failed before it began, with {last}; the logs are in {job.folder / 'logs'}"
        ) from error


def _work(rank: int, world: int, rendezvous: str, job: Job) -> None:
    train(job, rank, rank, init_method=rendezvous, world_size=world)


def train(job: Job, rank: int, device: int, node: str = "", **meeting: Any) -> None:
    """Runs one worker of a job in this process, on its GPU ``device`` where the job uses GPUs. ``meeting`` is how
    torch.distributed is to find the others."""
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from launch.worker import work
    from suite.pipeline.topology import backend_of

    tqdm.set_lock(threading.RLock())  # nobody here draws bars, and a lock between processes outlives a killed one
    if job.use_gpu:
        torch.cuda.set_device(device)
    kind = torch.device("cuda" if job.use_gpu else "cpu")
    dist.init_process_group(backend_of(kind), rank=rank, timeout=timedelta(seconds=job.timeout_s), **meeting)
    work(job, rank, node)
    dist.destroy_process_group()
