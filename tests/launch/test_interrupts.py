"""An interrupt unwinds the main thread, whichever thread learns of it first."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.launch.command_line import environment

COMMAND = """
import hashlib
import subprocess
from launch import interrupts

interrupts.UNWIND_S = 60.0
interrupts.install()
try:
    with interrupts.interruptible():
        child = subprocess.Popen(["sleep", "600"])
        print("computes beside", child.pid, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # about a second without Python's lock
except KeyboardInterrupt:
    print("unwound", flush=True)
    interrupts.kill_children_and_exit()
"""


def test_an_interrupt_while_the_main_thread_is_in_a_long_call_unwinds_it_and_leaves_no_process():
    process = subprocess.Popen([sys.executable, "-c", COMMAND], env=environment(), stdout=subprocess.PIPE, text=True)
    text, _, child = process.stdout.readline().rpartition(" ")
    assert text == "computes beside"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert (printed.splitlines()[0], process.returncode) == ("unwound", 143)
    assert _has_ended(int(child))


TRAINING = """
import threading, time
from launch import interrupts

interrupts.UNWIND_S = 0.5
interrupts.install()
trains, asked = threading.Event(), threading.Event()
try:
    with interrupts.interruptible(), interrupts.first_sigterm(asked, trains.is_set):
        print("begins", flush=True)
        input()
        trains.set()
        print("trains", flush=True)
        asked.wait(60)
        time.sleep(interrupts.UNWIND_S + 1)
        print("saved", flush=True)
        input()
        raise interrupts.interrupted()
except KeyboardInterrupt:
    interrupts.kill_children_and_exit()
"""


@pytest.mark.parametrize("ends", ["at its start", "itself", "by a second signal", "by Ctrl-C"])
def test_the_first_sigterm_to_a_run_that_trains_only_asks_it_to_end(ends):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "begins\n"
    if ends != "at its start":
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "trains\n"
    process.send_signal(signal.SIGTERM)
    if ends != "at its start":
        assert process.stdout.readline() == "saved\n"
        if ends == "itself":
            print(file=process.stdin, flush=True)
        else:
            process.send_signal(signal.SIGTERM if ends == "by a second signal" else signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert said == "interrupted; run the same command again to restart\n"
    assert process.returncode == (130 if ends == "by Ctrl-C" else 143)


OWN = """
import multiprocessing as mp, os, signal, subprocess, sys, time
from launch import interrupts
from launch.worker.parent import end_with_parent

def worker(end, pids):
    leave = os._exit
    os._exit = lambda code: (time.sleep(1), leave(code))  # long enough for the pool to replace a killed process
    end_with_parent()
    assert mp.get_start_method(allow_none=True) is None
    mp.set_start_method("fork")
    pool, child = mp.Pool(1), subprocess.Popen(["sleep", "600"])
    pids.put([os.getpid(), child.pid, pool._pool[0].pid])
    if end == "worker":
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    interrupts.install()
    forkserver = mp.get_context("forkserver")
    forkserver.set_forkserver_preload(["launch.backends.forked"])
    with interrupts.interruptible():
        for _ in range(5):
            with mp.get_context("fork").Pool(2):  # leaving it sends SIGTERM to processes that may not have begun
                pass
        pids = forkserver.SimpleQueue()
        process = forkserver.Process(target=worker, args=(sys.argv[1], pids))
        process.start()
        print(*pids.get(), flush=True)
        if sys.argv[1] == "command":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "worker":
            process.join()
        interrupts.kill_workers()
"""


@pytest.mark.parametrize(("end", "code"), [("none", 0), ("worker", 0), ("command", -signal.SIGKILL)])
def test_processes_that_a_worker_starts_end_with_it_and_those_of_the_command_do_not_interrupt_it(tmp_path, end, code):
    (tmp_path / "own.py").write_text(OWN)
    done = subprocess.run(
        [sys.executable, "own.py", end], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, timeout=200
    )  # fmt: skip
    assert done.returncode == code
    assert len(done.stdout.split()) == 3
    assert all(_has_ended(int(pid)) for pid in done.stdout.split())


FORKS = """
import os, signal, sys, threading, time
from launch import interrupts

def blocked():
    return [number.name for number in interrupts.SIGNALS if number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]

def ends(number):
    ready, ready_in_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(ready_in_child, b"x")
            time.sleep(60)
        finally:
            print("its finally ran", flush=True)
            os._exit(7)
    os.read(ready, 1)
    os.kill(pid, number)
    print(number.name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

def blocks(number):
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    pid = os.fork()
    if pid == 0:
        print("child", *blocked(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print("parent", *blocked(), flush=True)

interrupts.install()
with interrupts.interruptible():
    ends(signal.SIGINT)
    ends(signal.SIGTERM)
    other = threading.Thread(target=blocks, args=(signal.SIGTERM,))
    other.start()
    other.join()
    blocks(signal.SIGINT)
"""


def test_a_fork_keeps_blocked_signals_and_gets_pythons_own_handlers():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment(), stdout=subprocess.PIPE, text=True, timeout=200
    )
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "its finally ran", "SIGINT 7", "SIGTERM -15",
        "child SIGTERM", "parent SIGTERM", "child SIGINT", "parent SIGINT",
    ]  # fmt: skip


AT_ONCE = """
import os, signal
from launch.worker.parent import ignore_sigterm

os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
ignore_sigterm()
if (pid := os.fork()) == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_process_that_a_worker_has_just_forked_ends_by_sigterm():
    assert subprocess.check_output([sys.executable, "-c", AT_ONCE], env=environment(), text=True) == "-15\n"


def _has_ended(pid):
    """Whether a process ends in a few seconds; nobody may collect it."""
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
