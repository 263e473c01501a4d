"""Sweeps on a Ray cluster of several nodes: concurrent members, a killed one, others' devices, an interrupt."""

import json
import os
import signal
import sys

import psutil
import pytest
import ray

from tests.launch.command_line import losses
from tests.slow.running import Running
from tests.slow.small_sweep import STEPS
from tests.slow.supervision.test_nodes import Machines

GONE_S = 30.0


@pytest.fixture
def cluster(ended):
    return ended(Machines(2)).cluster


class Sweep(Running):
    """A running sweep, started from the command line."""

    def run(self, name):
        return self.folder / "runs/small" / name

    def attempts(self, name):
        path = self.run(name) / "attempts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def began(self, name):
        return [line["began"] for line in self.attempts(name) if "began" in line]

    def saved(self, name):
        return list(self.run(name).glob("checkpoints/*/manifest.json"))

    def driver(self, name):
        """Returns the process of a member."""
        for child in psutil.Process(self.process.pid).children():
            if any(file.path.endswith(f"logs/small-{name}.log") for file in child.open_files()):
                return child
        raise AssertionError(f"no process of {name}: {self.printed}")


@pytest.fixture
def start(tmp_path, cluster, ended):
    command = [sys.executable, "-m", "tests.slow.small_sweep"]
    return lambda name: ended(Sweep(tmp_path, [*command, name], RAY_ADDRESS=cluster.address))


def test_a_killed_member_is_resumed_and_one_that_fails_again_is_named(start):
    sweep = start("faulty")
    sweep.until(lambda: sweep.saved("twin-0"))
    driver = sweep.driver("twin-0")
    driver.kill()
    sweep.wait(code=1)
    first, second = (sweep.attempts(name) for name in ("twin-0", "twin-1"))
    (end_of_second,) = [line["ended"] for line in second if line.get("outcome") == "done"]
    assert sweep.began("twin-0")[0] < end_of_second
    assert sweep.began("twin-1")[0] < sweep.began("twin-0")[1]
    assert not any("outcome" in line for line in first if line.get("attempt") == 1)  # its driver was killed
    (done,) = [line for line in first if line.get("outcome") == "done"]
    assert done["start"] >= 10
    assert losses(sweep.run("twin-0")) == losses(sweep.run("twin-1"))
    assert len(losses(sweep.run("twin-0"))) == STEPS
    printed = sweep.printed
    assert "train small/twin-0: failed: its process ended by SIGKILL; its log is " in printed
    assert "small-twin-0.log; it is tried once more" in printed
    assert "train small/twin-0: done" in printed
    assert printed.count("train small/wrong: started") == 2
    assert "\ntrain small/wrong failed: " in printed
    assert "Traceback" not in printed
    assert "report: runs/faulty/report.html" in printed


def test_a_member_waits_for_devices_of_others_while_smaller_ones_run(start, cluster):
    ray.init(address=cluster.address, log_to_driver=False)

    @ray.remote(num_cpus=1)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    assert ray.get(other.ready.remote(), timeout=60)
    sweep = start("mixed")
    sweep.until(lambda: "small/twin-0: done" in sweep.printed)
    assert "train small/wide: started" not in sweep.printed  # the first in order needs both
    ray.kill(other)
    sweep.wait()
    assert "small/wide: done" in sweep.printed
    assert losses(sweep.run("twin-0")) == losses(sweep.run("twin-1"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_ends_all_members_and_the_next_sweep_resumes_them(start, number):
    sweep = start("small")
    sweep.until(lambda: sweep.saved("twin-0") and sweep.saved("twin-1"))
    members = [sweep.driver(name) for name in ("twin-0", "twin-1")]
    os.kill(sweep.process.pid, number)
    sweep.wait(60, code=143 if number == signal.SIGTERM else -9)
    _, alive = psutil.wait_procs(members, GONE_S)
    assert not alive
    if number == signal.SIGTERM:
        assert "interrupted; gpipe sweep small continues with the unfinished members" in sweep.printed
    outcomes = [line.get("outcome") for line in sweep.attempts("twin-0") if "ended" in line]
    assert outcomes == ["interrupted"]
    again = start("small")
    again.wait()
    assert again.attempts("twin-1")[-1]["start"] >= 10
    assert losses(sweep.run("twin-0")) == losses(sweep.run("twin-1"))
    assert len(losses(sweep.run("twin-0"))) == STEPS
