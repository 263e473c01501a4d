"""Hosts for the doctor's tests: network and mount namespaces of this machine, each with a Ray node of its own.

```
this machine   10.x.y.1   Ray's head, the test       one bridge; each host has its own address, /dev/shm and
host 2, 3      10.x.y.2, .3   a Ray node each        Ray folder
```
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.launch.command_line import ROOT
from tests.slow.jobs_head import PATIENT, free_ports
from tests.slow.running import Running


def missing():
    """Returns why this machine cannot have such hosts, or nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces and mounts take root on Linux; what facts mean is tested without them"
    lacking = [name for name in ("ip", "tc", "unshare", "nsenter", "taskset") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed (Debian: iproute2, util-linux)"
    name = f"gt{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this machine's kernel or container allows no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def during(do, undo):
    do()
    try:
        yield
    finally:
        undo()


class Host:
    """One host: its Ray node, and ways to break it."""

    def __init__(self, name, address, node):
        self.name, self.address, self.node, self.process = name, address, node, node.process

    def processes(self):
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def inside(self, *command):
        """Runs a command in the host's network and mounts."""
        return run("nsenter", "-t", self.process.pid, "-n", "-m", *command)

    def mounted(self, folder, *arguments):
        """A mount that only this host sees."""
        return during(lambda: self.inside("mount", *arguments, folder), lambda: self.inside("umount", "-l", folder))

    def stopped(self):
        """Every process of the host stands still, as on a machine that swaps or hangs."""
        halted = self.processes()

        def send(number):
            for pid in halted:
                os.kill(pid, number)

        return during(lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))

    def with_cores(self, cores):
        usual = os.sched_getaffinity(self.process.pid)
        return during(lambda: self._allow(cores), lambda: self._allow(usual))

    def _allow(self, cores):
        for pid in self.processes():
            with contextlib.suppress(subprocess.CalledProcessError):  # it may end meanwhile
                run("taskset", "-a", "-p", "-c", ",".join(map(str, cores)), pid)


class Hosts:
    """This machine as the head of a Ray cluster, and two hosts in it."""

    def __init__(self, folder):
        number = os.getpid()
        self._name = f"gd{number % 100_000}"
        self._net = f"10.{100 + number % 90}.{number // 90 % 250}"
        self._temporary = Path(f"/tmp/{self._name}")
        self.storage = folder / "storage"
        """A folder that all of them see, with room."""
        self._folder = folder
        self.head = None
        self.hosts = []
        self.extra = folder / "extra"
        """On the Python path of the last host alone."""
        self.extra.mkdir()
        self._port, self._dashboard, self._client = free_ports(3)
        self.address = f"{self._net}.1:{self._port}"

    def begin(self):
        for place in (self.storage, self._temporary):
            place.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=16g", "none", place)
        run("ip", "link", "add", self._name, "type", "bridge")
        run("ip", "addr", "add", f"{self._net}.1/24", "dev", self._name)
        run("ip", "link", "set", self._name, "up")
        self.head = self._ray(
            [], "--head", f"--node-ip-address={self._net}.1", f"--port={self._port}", "--include-dashboard=false",
            f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={self._client}",
            f"--temp-dir={self._temporary}",
        )  # fmt: skip
        self.head.until(lambda: "Ray runtime started" in self.head.printed, 120)
        for number in (2, 3):
            self.hosts.append(self._host(number))

    def _host(self, number):
        name, address, cable = f"{self._name}-{number}", f"{self._net}.{number}", f"{self._name}v{number}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", cable, "master", self._name, "up")
        gate = f"route add default via {self._net}.1"  # Ray looks for a way out, and is long about it without one
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up", gate):
            run("ip", "-n", name, *command.split())
        own = f"mount -t tmpfs -o size=16g none {self._temporary}; mount -t tmpfs -o size=8g none /dev/shm"
        return Host(name, address, self._ray(
            ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", f'{own}; exec "$@"', "sh"],
            f"--address={self.address}", f"--node-ip-address={address}",
            "--node-manager-port=7001", "--object-manager-port=7002",
            **({"PYTHONPATH": f"{self.extra}:{ROOT}"} if number == 3 else {}),
        ))  # fmt: skip

    def _ray(self, before, *arguments, **variables):
        command = [
            *before, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2",
            "--object-store-memory=80000000", "--disable-usage-stats", *arguments,
        ]  # fmt: skip
        return Running(self._folder, command, **PATIENT, **variables)

    def end(self):
        started = [*filter(None, [self.head]), *(host.node for host in self.hosts)]
        family = [child for one in started if one.process.poll() is None for child in _family(one.process.pid)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for one in started:
            one.end()
        psutil.wait_procs(family, 20)
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], check=False, capture_output=True)
        for place in (self.storage, self._temporary):
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _family(pid):
    one = psutil.Process(pid)
    return [*one.children(recursive=True), one]
