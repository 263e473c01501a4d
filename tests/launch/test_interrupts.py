"""An interrupt unwinds the main thread, whichever thread learns of it first."""

import signal
import subprocess
import sys
import time

from tests.launch.command_line import environment

COMMAND = """
import hashlib
from launch import interrupts

interrupts.UNWIND_S = 60.0
interrupts.install()
try:
    with interrupts.interruptible():
        print("computes", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # about a second without Python's lock
except KeyboardInterrupt:
    print("unwound", flush=True)
    interrupts.kill_children_and_exit()
"""


def test_an_interrupt_while_the_main_thread_is_in_a_long_call_unwinds_it():
    process = subprocess.Popen([sys.executable, "-c", COMMAND], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "computes\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert (printed, process.returncode) == ("unwound\n", 130)
