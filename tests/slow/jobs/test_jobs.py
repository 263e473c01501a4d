"""Runs as jobs on a cluster: a Ray head on this machine with its own token."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.command_line import SMALL, command, losses
from tests.slow.jobs_head import running_head
from tests.slow.running import Running

ROOT = Path(__file__).parents[3]
KEY = f"key-{secrets.token_hex(12)}"
"""A secret that must not be written anywhere."""
TINY = f"{SMALL.replace('checkpoint_every=3', 'checkpoint_every=5')} pipeline.stages=1 tracking.wandb=disabled"


CLIENT = """
import sys, tempfile, time
from pathlib import Path
from rich.console import Console
from experiments.custom.own_imports import ROOT
from launch.jobs.client import JobClient, UnreachableError
from launch.jobs.follow import JobLog
from launch.jobs.package import copy_checkout
client = JobClient("ADDRESS")

def ended(job):
    until = time.monotonic() + 60
    while not client.get_job_status(job).is_terminal() and time.monotonic() < until:
        time.sleep(0.2)

def follow(job, **limit):
    return JobLog(client, job, {}, Console(width=300)).follow(**limit)

"""


def with_client(address, code):
    """Returns Python code with a client of the cluster at an address."""
    return CLIENT.replace("ADDRESS", address) + code


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    with running_head(tmp_path_factory.mktemp("laptop")) as head:
        yield head


def line_of(printed, begin):
    """Returns the rest of the line of a command that begins so."""
    (line,) = {line.removeprefix(begin) for line in printed.splitlines() if line.startswith(begin)}
    return line


def shell(head, line):
    """Runs a line that a command printed, as a person would; returns what it prints."""
    return head.run(line, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def stopped(head):
    """A run that was submitted from another folder, followed until an interrupt, and stopped by the printed line; with
    what the follower and Ray's own commands printed."""
    words = ("--set", f"{TINY} train.steps=100000", "--storage", str(head.storage), "--job", "first")
    submit = command("submit", "t24_1_3b_wide", "--address", head.address, "--scale", "laptop", *words)
    # a background process of a shell ignores SIGINT, and its children inherit that
    follower = Running(head.folder, ["env", "--default-signal=INT", *submit], **head.key, WANDB_API_KEY=KEY)
    try:
        follower.until(lambda: list(head.storage.glob("runs/*/*/checkpoints/00000005/manifest.json")))
        follower.process.send_signal(signal.SIGINT)
        follower.wait(30, code=130)
    finally:
        follower.end()
    followed = follower.printed
    logged = shell(head, line_of(followed, "follow it: ").replace(" --follow", ""))
    stop_output = shell(head, line_of(followed, "stop it: "))
    (run,) = head.storage.glob("runs/*/*")
    return run, followed, logged, stop_output


@pytest.fixture(scope="module")
def finished(head, stopped):
    """The same run, resumed by another job to its end."""
    run, followed, *_ = stopped
    steps = len(losses(run)) + 20
    words = line_of(followed, "resume its run then: gpipe submit ").split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    run_id = f"{run.parent.name}/{run.name}"
    assert given == {"--run": run_id, "--storage": str(head.storage), "--address": head.address}
    printed = head.gpipe(
        "submit", "--run", given["--run"], "--set", f"train.steps={steps}", "--storage", given["--storage"], "--job",
        "second", seconds=400,
    )  # fmt: skip
    return run, steps, printed


def test_the_package_is_described_and_the_job_outlives_its_follower(head, stopped):
    run, followed, logged, stop_output = stopped
    lines = followed.splitlines()
    assert re.match(r"package: \d+ tracked files, \d\.\d\d MiB, commit [0-9a-f]+", lines[0])
    assert re.search(r"^node: \S+ \(\S+\)$", followed, re.MULTILINE)
    assert re.search(r"^all \d pinned packages are installed on 1 node$", followed, re.MULTILINE)
    assert {f"storage: {head.storage}", "devices: 2 of 2 CPUs are free", f"folder: {run}"} <= set(lines)
    assert "interrupted; job first keeps running" in lines
    assert f"folder: {run}" in logged
    assert "Job 'first' was stopped" in stop_output


def test_a_stopped_run_is_resumed_by_another_job_and_its_page_is_brought_by_the_printed_line(head, finished):
    run, steps, printed = finished
    assert "resumed at step" in printed
    assert f"step {steps}/{steps}  loss" in printed
    assert printed.splitlines()[-2] == "job second is done"
    assert len(losses(run)) == steps
    shell(head, line_of(printed, "its page: "))
    assert (head.folder / "report.html").read_bytes() == (run / "report.html").read_bytes()


def test_no_secret_is_written_anywhere(head, finished):
    records = head.python(with_client(head.address, "print([job.dict() for job in client.list_jobs()])"))
    assert "first" in records
    for secret in (KEY, head.token):
        assert secret not in records
        found = subprocess.run(
            ["grep", "-rlFa", secret, str(head.session), str(head.storage), str(head.folder)], capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert found.stdout == ""
    assert list(head.session.glob("session_*/logs/runtime_env_agent.log"))  # where Ray writes a job's variables


def test_driver_and_workers_run_the_code_of_the_package(head):
    work = (
        "import launch, ray; ray.init(log_to_driver=False)\n"
        "def worker():\n"
        "    import launch; return launch.__file__\n"
        "print('found', launch.__file__, ray.get(ray.remote(worker).remote()))\n"
    )
    submit = f"""
import shlex
with tempfile.TemporaryDirectory() as place:
    copy_checkout(ROOT, Path(place), print)
    client.submit_job(
        entrypoint="exec {sys.executable} -c " + shlex.quote({work!r}), submission_id="third",
        runtime_env={{"working_dir": place}},
    )
ended("third")
print(client.get_job_logs("third"))
"""
    place = r"\S*/working_dir_files/\S*/launch/__init__\.py"
    assert re.search(rf"^found {place} {place}$", head.python(with_client(head.address, submit)), re.MULTILINE)


def test_a_failed_job_shows_its_root_cause_and_exit_code(head):
    place = ("--storage", str(head.storage), "--job")
    assert "error: no run 't128_6b/nothing'" in head.gpipe("submit", "--run", "t128_6b/nothing", *place, "no", code=2)
    arguments = ("submit", "t12_400m", "--set", "text.corpus=/nowhere", *place, "fourth")
    printed = head.gpipe(*arguments, code=2)
    lines = printed.splitlines()
    assert lines[-1] == "job fourth failed with exit code 2"
    assert lines[-2].startswith("error: there is no corpus '/nowhere'")
    assert "Traceback" not in printed
    assert "Running entrypoint" not in printed
    assert "already has a job fourth; choose another name with --job" in head.gpipe(*arguments, code=2)


def test_a_wrong_or_missing_token_is_rejected_and_never_shown(head, tmp_path):
    wrong = secrets.token_hex(16)
    arguments = ("submit", "t128_6b", "--storage", str(head.storage))
    printed = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=wrong)
    assert f"the cluster at {head.address} rejects this machine's token" in printed
    assert wrong not in printed
    printed = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=None, HOME=str(tmp_path))
    assert "requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH" in printed


def test_a_token_in_the_default_file_is_used(head, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(head.token)
    jobs = with_client(head.address, "print(client.list_jobs())")
    assert head.python(jobs, RAY_AUTH_TOKEN=None, RAY_AUTH_MODE=None, HOME=str(tmp_path))  # the list needs the token


def test_storage_that_cannot_be_written_is_one_sentence(head):
    printed = head.gpipe("submit", "t128_6b", "--storage", "/proc/nothing", "--job", "never", code=2)
    assert "error: the head cannot write to storage /proc/nothing" in printed


class Proxy:
    """A proxy to the head that can cut connections: one ends after ``limit_bytes`` from the head."""

    def __init__(self, address, limit_bytes):
        self._port, self.limit_bytes = int(address.rpartition(":")[2]), limit_bytes
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self.cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._copy, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self.limit_bytes), daemon=True).start()

    def _copy(self, source, to, limit_bytes):
        passed = 0
        with suppress(OSError):
            while data := source.recv(512):
                if limit_bytes is not None and (passed := passed + len(data)) > limit_bytes:
                    self.cut += 1
                    self.limit_bytes = None  # later connections are not cut
                    break
                to.sendall(data)
        for connection in (source, to):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()


def test_after_a_lost_connection_each_line_is_shown_once(head):
    submit = """
client.submit_job(entrypoint="for i in $(seq 300); do echo line $i of many; done", submission_id="fifth")
ended("fifth")
"""
    head.python(with_client(head.address, submit))
    proxy = Proxy(head.address, None)
    follow = """
print("ready", flush=True); sys.stdin.readline()
print("code", follow("fifth", lost_s=20))
"""
    with head.asked_when_ready(with_client(proxy.address, follow)) as ask:
        proxy.limit_bytes = 2500
        printed = ask()
    proxy.close()
    assert proxy.cut == 1
    assert f"lost the connection to {proxy.address}" in printed
    assert "connected again" in printed
    assert re.findall(r"^line (\d+) of many$", printed, re.MULTILINE) == [str(at) for at in range(1, 301)]
    assert printed.splitlines()[-1] == "code 0"


def test_a_cluster_that_stays_unreachable_is_one_sentence(head):
    proxy = Proxy(head.address, None)
    follow = """
print("ready", flush=True); sys.stdin.readline()
try:
    follow("gone", lost_s=1.5)
except UnreachableError as error:
    print(error)
"""
    with head.asked_when_ready(with_client(proxy.address, follow)) as ask:
        proxy.close()
        printed = ask()
    assert re.search(r"no answer for 2 s from .*; job gone keeps running; when it answers$", printed, re.MULTILINE)
    assert "ray job logs --address" in printed
    assert "Traceback" not in printed
