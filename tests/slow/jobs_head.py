"""A Ray head as a platform team starts one: a dashboard that takes jobs, a token of its own, and nodes that join it."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.launch.command_line import command, environment

PATIENT = {"RAY_raylet_start_wait_time_s": "100", "RAY_worker_niceness": "0"}
"""A busy machine is no fault of a node: Ray gives one up that has not begun within half a minute, and its workers are
niced, so that they take minutes to import torch."""


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return map(str, ports)


class Head:
    """A Ray head with a dashboard and ``cores``, its files below ``folder``, and the nodes that joined it."""

    def __init__(self, folder, cores=2):
        self.folder, self.token = folder, secrets.token_hex(16)
        self.storage = folder / "storage"
        self.storage.mkdir()
        self.session = Path(tempfile.mkdtemp(prefix="gpipe-"))  # its sockets bear no long paths
        self._port, dashboard, client = free_ports(3)
        self.address = f"http://127.0.0.1:{dashboard}"
        self._start_head = partial(
            self._start, cores, "--head", "--port", self._port, "--dashboard-host", "127.0.0.1", "--dashboard-port",
            dashboard, "--ray-client-server-port", client, "--temp-dir", str(self.session),
        )  # fmt: skip
        self.process = self._start_head()
        self._nodes = []

    def join(self, cores):
        """Adds a node to the cluster, with a Ray folder of its own: nodes that share one clear away each other's
        packages."""
        place = self.session.with_name(f"{self.session.name}-{len(self._nodes)}")
        self._nodes.append(self._start(cores, "--address", self.ray, "--temp-dir", str(place)))

    def _start(self, cores, *arguments):
        listen, grpc, metrics, agent = free_ports(4)
        ray = str(Path(sys.executable).with_name("ray"))
        variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
        with (self.folder / "head.log").open("a") as log:
            return subprocess.Popen(
                [ray, "start", "--block", "--num-cpus", str(cores), "--dashboard-agent-listen-port", listen,
                 "--dashboard-agent-grpc-port", grpc, "--metrics-export-port", metrics, "--runtime-env-agent-port",
                 agent, "--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", "100000000",
                 *arguments],
                env=variables | self.key | PATIENT, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def ray(self):
        """Ray's own address."""
        return f"127.0.0.1:{self._port}"

    @property
    def key(self):
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def wait(self):
        """Waits until the head runs. Starts it again where Ray gave it up, as it does where a busy machine takes more
        than 30 s to start a node."""
        log = self.folder / "head.log"
        for _ in range(3):
            while self.process.poll() is None and "Ray runtime started" not in log.read_text():
                time.sleep(0.2)
            if self.process.poll() is None:
                break
            self._kill(self.process)
            self.process = self._start_head()
        until = time.monotonic() + 60
        bearer = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.address}/api/jobs/", headers=bearer)
        while True:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(request, timeout=5).read()
                return
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < until, "no dashboard in time"
            time.sleep(0.2)

    def end(self):
        for process in (*self._nodes, self.process):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
            self._kill(process)
        for place in (self.session, *self.session.parent.glob(f"{self.session.name}-*")):
            shutil.rmtree(place, ignore_errors=True)

    @staticmethod
    def _kill(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def variables(self, **more):
        given = {**environment(), **self.key, **more}
        return {name: value for name, value in given.items() if value is not None}

    def run(self, command, code=0, seconds=200, **more):
        """Runs a command, or a shell's line, as a person at a laptop does; returns what it printed."""
        done = subprocess.run(
            command, shell=isinstance(command, str), cwd=self.folder, env=self.variables(**more), capture_output=True,
            text=True, timeout=seconds, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def gpipe(self, *arguments, **more):
        return self.run(command(*arguments, "--address", self.address), **more)

    def python(self, code, **more):
        """Runs code here, beside the command line; this process itself must not learn the head's token."""
        return self.run([sys.executable, "-c", code], **more)

    @contextmanager
    def asked_when_ready(self, code):
        """Runs code that prints ``ready`` and reads a line. Yields what sends the line and returns what is said."""
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=self.folder, env=self.variables(), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            assert process.stdout.readline() == "ready\n"
            yield lambda: process.communicate("\n", timeout=60)[0]
        finally:
            process.kill()


@contextmanager
def running_head(*arguments, **options):
    head = Head(*arguments, **options)
    try:
        head.wait()
        yield head
    finally:
        head.end()
