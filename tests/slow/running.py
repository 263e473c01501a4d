"""A command that runs beside its test: what it has printed so far, a wait for what it does, and its end."""

import subprocess
import sys
import time
from uuid import uuid4

from tests.launch.command_line import environment

EXPERIMENT = [sys.executable, "-m", "launch.cli", "experiment", "t24_1_3b_wide", "--scale", "laptop"]

LONG_S = 1500.0
"""For what has no promised time: beside other tests a run may start minutes later."""


class Running:
    """A command in a folder, in a session of its own."""

    def __init__(self, folder, command, **variables):
        """``variables`` are added to the environment of commands."""
        self.folder, self.log = folder, folder / f"printed-{uuid4().hex}"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment() | variables, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def printed(self):
        return self.log.read_text(errors="replace")

    def until(self, seen, seconds=LONG_S):
        """Waits for something to be seen, while the command runs; returns it."""
        end = time.monotonic() + seconds
        while not (found := seen()):
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < end, self.printed
            time.sleep(0.05)
        return found

    def wait(self, seconds=LONG_S, code=0):
        assert self.process.wait(seconds) == code, self.printed

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
