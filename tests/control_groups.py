"""Real control groups of this kernel, which limit what the processes in them take."""

import os
import signal
import time
from contextlib import contextmanager, suppress
from uuid import uuid4

import pytest

from suite.cgroups import TREE


@contextmanager
def control_groups(v1, v2):
    """The folders of new groups with these limits: in version 1 those of each controller, or the one of version 2.
    Skips the test where nobody can make groups."""
    name, made = f"gpipe-test-{uuid4().hex[:8]}", []
    try:
        try:
            for tree, files in ({"": v2} if (TREE / "cgroup.controllers").exists() else v1).items():
                place = TREE / tree / name
                place.mkdir()
                made.append(place)
                for file, value in files.items():
                    (place / file).write_text(str(value))
        except OSError as error:
            pytest.skip(f"this machine lets nobody make control groups: {error}")
        yield made
    finally:
        for place in made:
            _remove(place)


def _remove(group):
    """Ends the processes that are left in a group, and removes it."""
    deadline = time.monotonic() + 20.0
    while pids := (group / "cgroup.procs").read_text().split():
        assert time.monotonic() < deadline, f"processes {pids} do not end"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)
    group.rmdir()
