"""Starts worker processes on this machine by a forkserver: all of a run, or that of one StageActor or torchrun rank."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from launch import interrupts
from launch.worker.parent import end_with_parent, ignore_sigterm
from suite.errors import ForkserverError, PeerLostError, SuiteError, WorkerDiedError, WorkerError
from suite.paths import check_socket_folder

if TYPE_CHECKING:  # not needed to start processes
    from torch.distributed import Store  # type: ignore[attr-defined]

    from experiments.base.experiment import Experiment
    from launch.supervision.watchdog import Watchdog
    from launch.worker.attempt import Attempt

PRELOAD = ["launch.backends.forked", "launch.worker.worker", "deepspeed"]
"""Imported once, by the forkserver: a worker then starts in a tenth of a second."""

PRELOAD_LATE = ["deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"]
"""Imported by DeepSpeed's engine, the first with PyTorch's compiler: over two seconds in each worker. Only without a
GPU: a process that has initialized CUDA must not be forked, and the compiler may do so."""

DATA_LIBRARIES = ["datasets", "transformers"]
"""Read prepared data. Preloaded where the driver has or will have them, and for workers whose driver is elsewhere."""

ROOT_CAUSE_DELAY_S = 5.0
"""Seconds to wait for the root cause once a worker has reported a lost peer."""

SAFE_PATH = "PYTHONSAFEPATH"
"""Keeps Python from searching the current folder for modules."""

OWN_SAFE_PATH = "gpipe"
"""Its value if it is not the user's; any will do."""

SOCKET = "/pymp-12345678/listener-12345678"
"""A path of the forkserver's socket in the folder of temporary files."""

INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The network interfaces of torch.distributed. Workers take over those of this process as they are when it starts them:
the forkserver may have begun before they were set. Without any, workers are on this machine alone."""

STORE_S = 300
"""Seconds for a worker to connect to the rendezvous store."""

_workers = set[int | None]()  # of all calls that run now, by pid

FORKSERVER_END_S = 1.0
"""Seconds from the end of the forkserver's pipes to its exit."""


def run_processes(
    target: Callable[..., Any],
    world: int,
    *args: Any,
    deadline_s: float = 600.0,
    should_stop: Callable[[], bool] = bool,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Runs ``target(rank, world, rendezvous, *args)`` in ``world`` fresh processes; returns their results by rank.

    ``rendezvous`` is a URL for torch.distributed. ``target`` must be importable by name. The first failure ends all
    processes and is raised here: a SuiteError as it is, any other exception with its traceback. When ``should_stop``,
    which is polled, returns True, all processes are ended. The forkserver also imports ``preload``, unless it is
    already running.

    Raises WorkerDiedError when a process dies, ForkserverError when the forkserver dies, WorkerError when the deadline
    passes or ``should_stop`` returns True.
    """
    start_forkserver(preload)
    context = mp.get_context("forkserver")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        interfaces = {name: os.environ[name] for name in INTERFACES if name in os.environ}
        tasks = [(results, interfaces, target, rank, world, rendezvous, *args) for rank in range(world)]
        processes: list[BaseProcess] = [context.Process(target=_call, args=task) for task in tasks]
        others = {worker.pid for worker in interrupts.workers()}
        try:
            for process in processes:
                process.start()
                _workers.add(process.pid)
            return _collect(processes, results, time.monotonic() + deadline_s, should_stop)
        finally:
            started = [process for process in processes if process.ident is not None]
            _workers.difference_update(process.pid for process in started)
            interrupts.kill_workers({*others, *_workers})  # not the user's own, nor those of a call in another thread
            for process in started:
                process.join(10)
            results.close()


def run_worker_alone(
    rank: int,
    address: str,
    prefix: str,
    attempt: Attempt,
    device: int | None,
    node: str,
    should_stop: Callable[[], bool],
    preload: Sequence[str] = (),
) -> SuiteError | None:
    """Runs one rank's worker in a fresh process, without a deadline, while the job's others run elsewhere; returns its
    error, or None. The workers meet in the store at ``address``, "host port". ``prefix`` is another in each attempt, so
    keys of earlier ones are not found."""
    worker, preload = (rank, address, prefix, attempt, device, node), [*preload, *DATA_LIBRARIES]
    try:
        run_processes(_run_worker_at, 1, *worker, deadline_s=math.inf, should_stop=should_stop, preload=preload)
    except WorkerDiedError as error:
        return WorkerDiedError(rank, error.how)
    except ForkserverError as error:
        return ForkserverError(f"on {socket.gethostname()}, for worker {rank}: {error}")
    except SuiteError as error:
        return error
    except RuntimeError as error:  # it failed before it could report where; the message contains its traceback
        return WorkerDiedError(rank, f"it failed while it started: {str(error).strip().splitlines()[-1]}", "start")
    return None


def _run_worker_at(
    _: int, __: int, ___: str, rank: int, address: str, prefix: str, attempt: Attempt, device: int | None, node: str
) -> None:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    if attempt.working_dir is not None and attempt.working_dir.is_dir():  # other machines may not have it
        os.chdir(attempt.working_dir)
    host, port = address.split()
    store = PrefixStore(prefix, TCPStore(host, int(port), timeout=timedelta(seconds=STORE_S)))
    run_worker(rank, attempt.workers, store, attempt, device, node)


def modules_to_preload() -> list[str]:
    """Returns what the forkserver imports. Names DeepSpeed's accelerator: otherwise its import asks CUDA, after which
    no worker may be forked if CUDA answers itself; without a GPU it prints a warning to standard output."""
    import torch

    has_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if has_gpu else "cpu")
    return [*PRELOAD, *([] if has_gpu else PRELOAD_LATE), *(name for name in DATA_LIBRARIES if name in sys.modules)]


def start_forkserver(preload: Sequence[str] = ()) -> None:
    """Starts the forkserver, which imports for seconds, also ``preload``; does nothing while it runs. It starts with
    signals blocked, which its workers inherit: those of a terminal or a scheduler reach them too, but this process ends
    them. It imports nothing from the current folder, in which a user may have a ``datasets`` of their own."""
    check_socket_folder(tempfile.gettempdir(), SOCKET)
    mp.get_context("forkserver").set_forkserver_preload([*modules_to_preload(), *preload])
    warn_options, by_user = list(sys.warnoptions), os.environ.get(SAFE_PATH)
    # of the process that unlinks the semaphores of killed processes, which starts with these options
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    resource_tracker.ensure_running()  # before signals are blocked: at its start it unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.SIGNALS)
    os.environ[SAFE_PATH] = by_user or OWN_SAFE_PATH
    try:
        forkserver.ensure_running()
    finally:
        if not by_user:
            del os.environ[SAFE_PATH]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.warnoptions[:] = warn_options


def _end_forkserver() -> None:
    """Ends the forkserver with this process: one that still imports would keep the output of a command open."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public API
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


Finalize(None, _end_forkserver, exitpriority=-100)  # after the wait for a user's own processes, and not in forks


def _collect(processes: list[BaseProcess], results: Any, until: float, should_stop: Callable[[], bool]) -> list[Any]:
    values: dict[int, Any] = {}
    collateral: dict[int, PeerLostError] = {}
    while len(values) < len(processes):
        if should_stop():
            raise WorkerError("the workers were ended")
        try:
            rank, value, error = results.get(timeout=0.1)
        except queue.Empty:
            reported = values.keys() | collateral.keys()
            dead = [rank for rank, p in enumerate(processes) if p.exitcode is not None and rank not in reported]
            if dead and results.empty():
                if processes[dead[0]].exitcode == 255:  # multiprocessing's, where it is not known
                    _check_forkserver()
                how = f"its process {_describe_end(processes[dead[0]].exitcode or 0)}"
                raise WorkerDiedError(dead[0], how) from None
            if time.monotonic() > until and collateral:
                raise next(iter(collateral.values())) from None
            if time.monotonic() > until:
                late = [rank for rank in range(len(processes)) if rank not in values]
                raise WorkerError(f"workers {late} returned no result in time and were ended") from None
            continue
        if error is not None:
            cause, trace = error
            if isinstance(cause, PeerLostError):
                # the lost worker will report its own failure, or be found dead
                collateral[rank] = cause
                until = min(until, time.monotonic() + ROOT_CAUSE_DELAY_S)
                continue
            if isinstance(cause, SuiteError):
                raise cause
            raise RuntimeError(f"worker {rank} failed\n{trace}") from cause
        values[rank] = value
    return [values[rank] for rank in range(len(processes))]


def _check_forkserver() -> None:
    """Raises ForkserverError when the forkserver is dead. Workers report their exit codes through it, and die with it;
    the next start of a process restarts it."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # no public API
    until, ended = time.monotonic() + FORKSERVER_END_S, None
    while ended is None and time.monotonic() < until:
        # WNOWAIT leaves the exit status for multiprocessing, which waits for the process when it restarts it
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.01)
    if ended is not None:
        how = _describe_end(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        raise ForkserverError(
            f"the process that workers are forked from (Python's forkserver, process {pid}) {how}, and all "
            "workers died with it"
        )


def _describe_end(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _call(results: Any, interfaces: Mapping[str, str], target: Callable[..., Any], rank: int, *args: Any) -> None:
    end_with_parent()
    ignore_sigterm()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **interfaces})
    if os.environ.get(SAFE_PATH) == OWN_SAFE_PATH:  # not for the worker's own processes
        del os.environ[SAFE_PATH]
    try:
        results.put((rank, target(rank, *args), None))
    except BaseException as error:
        results.put((rank, None, (error if isinstance(error, SuiteError) else None, traceback.format_exc())))
        results.close()
        results.join_thread()
        os._exit(1)


class LocalLauncher:
    """Starts a job's K x R workers as processes on this machine."""

    def run(self, attempt: Attempt, experiment: Experiment, watchdog: Watchdog) -> None:
        """Runs one attempt, until it ends or the watchdog has a verdict."""
        os.environ["OMP_NUM_THREADS"] = str(experiment.train.threads or attempt.cores)
        try:
            run_processes(
                run_worker, attempt.workers, attempt, deadline_s=math.inf, should_stop=lambda: watchdog.should_stop
            )
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1]
            raise WorkerError(
                f"a worker failed while it started: {last}; the logs are in {attempt.folder / 'logs'}"
            ) from error

    def available_devices(self, workers: int) -> int:
        """Returns ``workers``: this machine does not lose devices."""
        return workers

    def leave_out(self, rank: int) -> str:
        """Returns nothing: there is no other machine."""
        return ""


def run_worker(
    rank: int, world: int, rendezvous: str | Store, attempt: Attempt, device: int | None = None, node: str = ""
) -> None:
    """Runs one worker of a job in this process, on GPU ``device`` (by default ``shared_gpu``) if the job uses GPUs.
    The workers meet at a URL or in a store."""
    import torch.distributed as dist
    from tqdm import tqdm

    from experiments.registry import read_experiment_file
    from launch.worker.distributed import init_process_group, shared_gpu
    from launch.worker.gpu_debug import start_flight_recorder
    from launch.worker.run_plan import RunPlan
    from launch.worker.worker import train_stage

    tqdm.set_lock(threading.RLock())  # tqdm's default lock is shared between processes, and outlives a killed one
    experiment_file, plan_file = attempt.input_files
    experiment, plan = read_experiment_file(experiment_file), RunPlan.read(plan_file)
    gpu = None
    if attempt.use_gpu:
        gpu = shared_gpu(rank, world) if device is None else device
        start_flight_recorder(attempt.run.gpu, attempt.number)
    join = partial(init_process_group, rank, world, rendezvous, gpu=gpu, timeout_s=plan.timeout_s)
    train_stage(experiment, plan, attempt, rank, join, node)
    dist.destroy_process_group()
