"""A command line that is interrupted: all its processes are found by a mark, whoever their parents are."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil

from tests.slow.running import LONG_S, Running

GONE_S, SAVED_S = 5.0, 30.0
"""Seconds from an interrupt until no process is left; where the run saves first, what Slurm and Kubernetes grant."""

MARK = "GPIPE_TEST_MARK"
"""Environment variable that marks all processes of one command."""

CONTROL = """
import time
began = time.monotonic()
while time.process_time() < 1:
    pass
print(time.monotonic() - began)
"""
"""Prints how many seconds a second of the processor takes."""

SLOWEST = 4.0
"""Largest factor by which other work may delay an end."""


class Command(Running):
    """One command line; all its processes are marked."""

    def __init__(self, folder, arguments, program=(sys.executable, "-m", "launch.cli")):
        self.mark = uuid4().hex
        super().__init__(folder, [*program, *arguments], **{MARK: self.mark})

    def wait_for(self, condition):
        """Waits until a condition holds or the command ends."""
        deadline = time.monotonic() + LONG_S
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.01)

    def handles_signals(self):
        """Returns whether the signal handlers are installed: SIGTERM is caught."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return False
        caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def interrupt(self, number, how):
        """Sends a signal; returns the time before."""
        began = time.monotonic()
        if how == "group":
            os.killpg(self.process.pid, number)
            return began
        for _ in range(1 + (how == "twice")):
            os.kill(self.process.pid, number)
            time.sleep(0.15 * (how == "twice"))
        return began

    def live_processes(self):
        """Returns the processes that have the mark."""
        mark, processes = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    processes.append(psutil.Process(int(path.name)))
            except (OSError, psutil.Error):
                continue
        return [process for process in processes if is_running(process)]

    def check_end(self, began, done=None, gone_s=GONE_S):
        """Asserts that the command ended like an interrupted one; returns its exit code, and the seconds until the last
        process was gone. ``done`` is a pattern in the output of a command that had finished already; without it the
        command cannot have finished. Beside other work ``gone_s`` grows with the control, at most SLOWEST times."""
        control = subprocess.Popen([sys.executable, "-c", CONTROL], stdout=subprocess.PIPE)
        while (alive := self.live_processes()) and time.monotonic() < began + SLOWEST * gone_s + 40:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        slower = min(SLOWEST, max(1.0, float(control.communicate(timeout=60)[0])))
        printed = self.printed
        assert not alive, [(process.pid, process.cmdline()) for process in alive]
        assert seconds < gone_s * slower, f"gone after {seconds:.1f} s, a second took {slower:.2f}\n{printed}"
        code = self.process.wait(5)
        assert "Traceback" not in printed, printed
        if done is not None and code == 0:
            assert re.search(done, printed), printed
            return code, seconds
        assert code in (130, 143), (code, printed)
        assert len(re.findall(r"^interrupted; ", printed, re.MULTILINE)) == 1, printed
        assert printed.splitlines()[-1].startswith("interrupted; "), printed
        return code, seconds

    def end(self):
        """Kills all processes that are left."""
        for process in self.live_processes():
            process.kill()
        self.process.wait(30)


def is_running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
