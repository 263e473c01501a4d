"""An interrupt unwinds the main thread, whichever thread learns of it first."""

import signal
import subprocess
import sys
import time

import psutil

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
    assert (printed.splitlines()[0], process.returncode) == ("unwound", 130)
    assert _has_ended(int(child))


def _has_ended(pid):
    """Whether a process ends in a few seconds; nobody may collect it."""
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
