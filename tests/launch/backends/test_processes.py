"""Plain processes: results by rank, the first failure, and no process left behind."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import interrupts
from launch.backends import processes
from launch.backends.processes import (
    DATA_LIBRARIES,
    INTERFACES,
    PRELOAD,
    PRELOAD_LATE,
    modules_to_preload,
    run_processes,
)
from launch.backends.select import select_backend
from suite.errors import ForkserverError, SettingError, WorkerError


def answer(rank, world, rendezvous, offset):
    return rank + offset, world


def fail(rank, world, rendezvous, kind):
    if rank == 1:
        if kind == "user":
            raise SettingError("a user's fault")
        if kind == "bug":
            raise ZeroDivisionError("a bug")
        os._exit(0 if kind == "end" else 7)
    time.sleep(120)


def begin(rank, world, rendezvous):
    """Returns the modules that a new worker has imported, the CPU seconds of its start, how many objects its garbage
    collections leave out, and their thresholds."""
    return set(sys.modules), time.process_time(), gc.get_freeze_count(), gc.get_threshold()


def sleep(rank, world, rendezvous):
    time.sleep(120)


def interfaces(rank, world, rendezvous):
    return [os.environ.get(name) for name in INTERFACES]


def test_results_come_by_rank():
    assert run_processes(answer, 3, 10) == [(10, 3), (11, 3), (12, 3)]


@pytest.mark.parametrize(
    ("start", "most"), [(lambda: run_processes(answer, 1, 0), 75), (lambda: select_backend("ray"), 39)]
)
def test_a_temporary_folder_whose_sockets_have_too_long_paths_is_named(monkeypatch, start, most):
    folder = "/" + most * "x"
    monkeypatch.setattr("tempfile.tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    said = f"{folder}, has a path of {most + 1} bytes, and sockets in it allow {most}; set TMPDIR"
    with pytest.raises(SettingError, match=said):
        start()


@pytest.mark.slow
def test_a_worker_starts_with_its_modules_already_imported():
    """The forkserver silently ignores a preload name that cannot be imported, which slows down every worker."""
    names = [*PRELOAD, *PRELOAD_LATE]
    code = f"import importlib, time\nfor name in {names}: importlib.import_module(name)\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = float(done.stdout.splitlines()[-1])
    for modules, seconds, left_out, thresholds in run_processes(begin, 2):
        assert {*names, "torch._dynamo"} <= modules
        assert seconds < imported / 2
        assert left_out > 10 * len(modules)
        assert thresholds == gc.get_threshold()


def test_workers_are_on_this_machine_until_an_interface_is_chosen(monkeypatch):
    """A rank of torchrun measures on its machine, before its workers meet those of others."""
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    assert run_processes(interfaces, 1) == [["lo", None]]
    assert not {*INTERFACES} & {*os.environ}
    for chosen in ("eth0", ""):  # empty: that of the host name
        for name in INTERFACES:
            monkeypatch.setenv(name, chosen)
        assert run_processes(interfaces, 1) == [[chosen, chosen]]


def in_a_new_process(code, *folders):
    """Returns what a process prints that has imported ``launch.backends.processes``."""
    code = f"from launch.backends.processes import *\n{code}"
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, [*folders, Path(processes.__file__).parents[2]]))}
    given = {"env": environment, "stdout": subprocess.PIPE, "text": True, "timeout": 120, "check": True}
    return subprocess.run([sys.executable, "-c", code], **given).stdout


def test_workers_inherit_that_signals_are_blocked():
    """A scheduler's SIGTERM reaches all processes of a run, and the driver alone decides what ends."""
    status = in_a_new_process(
        "start_forkserver()\nprint(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())"
    )
    (blocked,) = re.findall(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)
    assert all(int(blocked, 16) >> number - 1 & 1 for number in interrupts.SIGNALS)


def test_a_command_that_ends_early_does_not_wait_for_the_imports_of_its_forkserver(tmp_path):
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(600)")
    in_a_new_process("start_forkserver(['endless'])", tmp_path)


def test_a_worker_gets_the_data_libraries_of_its_driver(monkeypatch):
    for name in DATA_LIBRARIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = modules_to_preload()
    monkeypatch.setitem(sys.modules, "datasets", sys)
    assert modules_to_preload() == [*before, "datasets"]


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("user", SettingError, "^a user's fault$"),
        ("bug", RuntimeError, "worker 1 failed"),
        ("death", WorkerError, "code 7"),
        ("end", WorkerError, "code 0"),
    ],
)
def test_the_first_failure_ends_all_workers_at_once(kind, error, message):
    """The other one would sleep for longer than until the deadline."""
    with pytest.raises(error, match=message):
        run_processes(fail, 2, kind, deadline_s=100.0)


def test_a_deadline_ends_workers_that_do_not_finish():
    with pytest.raises(WorkerError, match=r"workers \[0, 1\] returned no result in time"):
        run_processes(sleep, 2, deadline_s=1.0)


def kill_forkserver(rank, world, rendezvous, folder):
    """Rank 0 kills the forkserver, once all ranks have recorded their process id."""
    (folder / str(os.getpid())).touch()
    while rank == 0 and len(list(folder.iterdir())) < world:
        time.sleep(0.01)
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(120)


@pytest.mark.slow
def test_a_killed_forkserver_is_reported_and_its_workers_die_with_it(tmp_path):
    with pytest.raises(
        ForkserverError, match=r"forkserver, process \d+\) was killed by SIGKILL, and all workers died with it"
    ):
        run_processes(kill_forkserver, 2, tmp_path)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    until = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


ASKS_CUDA = """
import importlib, sys, torch
asked = []
torch.cuda.device_count = lambda: asked.append("device_count") or 1
torch.cuda.is_available = lambda: asked.append("is_available") or True
for module in sys.argv[1:]:
    importlib.import_module(module)
print(asked)
"""


@pytest.mark.slow
def test_what_the_forkserver_imports_does_not_ask_cuda_where_there_is_one():
    """An answer of CUDA's own would initialize it, and no worker could be forked from that process."""
    command, environment = [sys.executable, "-c", ASKS_CUDA, *PRELOAD], {**os.environ, "DS_ACCELERATOR": "cuda"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("available", "accelerator"), [(True, "cuda"), (False, "cpu")])
def test_deepspeed_is_told_its_accelerator_before_the_forkserver_imports_it(monkeypatch, available, accelerator):
    monkeypatch.setenv("DS_ACCELERATOR", "")  # so that it is restored
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    assert (PRELOAD_LATE[0] in modules_to_preload()) != available
    assert os.environ["DS_ACCELERATOR"] == accelerator
