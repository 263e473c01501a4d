"""Runs as jobs on a cluster: a Ray head on this machine with its own token."""

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.command_line import SMALL, command, losses
from tests.slow.jobs_head import Head

ROOT = Path(__file__).parents[3]
KEY = f"key-{secrets.token_hex(12)}"
"""A secret that must not be written anywhere."""
TINY = f"{SMALL.replace('checkpoint_every=3', 'checkpoint_every=5')} pipeline.stages=1 tracking.wandb=disabled"


def reset_sigint():
    """Restores the default action: background processes of a shell ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = Head(tmp_path_factory.mktemp("laptop"))
    try:
        head.wait()
        yield head
    finally:
        head.end()


@pytest.fixture(scope="module")
def stopped(head):
    """A run that was submitted, followed until an interrupt, and stopped; with the output of each command."""
    settings = f"{TINY} train.steps=100000"
    follower = subprocess.Popen(
        command("submit", "t24_1_3b_wide", "--address", head.address, "--scale", "laptop", "--set", settings,
                "--storage", str(head.storage), "--job", "first"),
        cwd=head.folder, env=head.variables(WANDB_API_KEY=KEY), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, preexec_fn=reset_sigint,
    )  # fmt: skip
    try:
        until = time.monotonic() + 200
        while not list(head.storage.glob("runs/*/*/checkpoints/00000005/manifest.json")):
            assert follower.poll() is None, follower.communicate()[0]
            assert time.monotonic() < until, "no checkpoint in time"
            time.sleep(0.3)
        follower.send_signal(signal.SIGINT)
        followed = follower.communicate(timeout=30)[0]
    finally:
        follower.kill()
    assert follower.returncode == 130, followed
    listed = head.gpipe("jobs")
    stop_output = head.gpipe("stop", "first")
    (run,) = head.storage.glob("runs/*/*")
    return run, followed, listed, stop_output


@pytest.fixture(scope="module")
def finished(head, stopped):
    """The same run, resumed by another job to its end, then fetched."""
    run, *_ = stopped
    steps = len(losses(run)) + 20
    id = f"{run.parent.name}/{run.name}"
    printed = head.gpipe(
        "submit", "--run", id, "--set", f"train.steps={steps}", "--storage", str(head.storage), "--job", "second"
    )  # fmt: skip
    return run, steps, printed, head.gpipe("fetch", "second")


def test_the_package_is_described_and_the_job_outlives_its_follower(head, stopped):
    run, followed, listed, stop_output = stopped
    lines = followed.splitlines()
    assert re.match(r"package: \d+ tracked files, \d\.\d\d MiB, commit [0-9a-f]+", lines[0])
    assert any(re.match(r"all \d\d+ pinned packages are installed on the cluster", line) for line in lines)
    assert f"storage: {head.storage}" in lines
    assert f"folder: {run}" in lines
    assert "interrupted; job first keeps running" in lines
    for verb in ("logs", "stop", "fetch"):
        assert f"gpipe {verb} first --address {head.address}" in followed
    assert re.search(r"first .* running", listed)
    assert "job first is stopped" in stop_output
    assert f"gpipe submit --run {run.parent.name}/{run.name} --storage {head.storage}" in stop_output


def test_a_stopped_run_is_resumed_by_another_job_and_fetched(head, finished):
    run, steps, printed, fetched = finished
    assert "resumed at step" in printed
    assert f"step {steps}/{steps}  loss" in printed  # from the marked lines of the job's log
    assert "@gpipe" not in printed
    assert printed.splitlines()[-1] == "job second is done"
    here = head.folder / "runs" / run.parent.name / run.name
    assert f"folder: {here}" in fetched
    for name in ("record.json", "metrics.jsonl", "plan.txt", "timeline.png", "logs/stage-0-0.log"):
        assert (here / name).read_bytes() == (run / name).read_bytes()
    assert not list(here.rglob("*.safetensors"))
    assert len(losses(here)) == steps
    assert "resumed at step" in (here / "job.log").read_text()


def test_both_jobs_of_a_run_can_be_fetched_again(head, finished):
    run, *_ = finished
    for job in ("second", "first"):
        assert f"folder: {head.folder / 'runs' / run.parent.name / run.name}" in head.gpipe("fetch", job)


def test_the_doctor_runs_on_the_head_and_prints_its_table(head):
    address = head.address.removeprefix("http://")  # a user may type it so
    done = subprocess.run(
        command("doctor", "--address", address), cwd=head.folder, env=head.variables(HOME=str(head.folder)),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert f"running the doctor on {head.address} as job doctor-" in done.stdout
    assert re.search(r"^(ok|warning|fault) +storage ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"checks(, all ok)?$", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stdout + done.stderr


def test_no_secret_is_written_anywhere(head, finished):
    records = head.python(
        "from launch.jobs.client import JobClient; "
        f"print([job.dict() for job in JobClient({head.address!r}).list_jobs()])"
    )
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
import shlex, tempfile, time
from pathlib import Path
from launch.jobs.client import JobClient
from experiments.custom.own_imports import ROOT
from launch.jobs.source_package import pack
client = JobClient({head.address!r})
with tempfile.TemporaryDirectory() as place:
    archive = Path(place) / "package.zip"
    pack(ROOT, archive, print)
    client.submit_job(
        entrypoint="exec {sys.executable} -c " + shlex.quote({work!r}), submission_id="third",
        runtime_env={{"working_dir": str(archive)}},
    )
until = time.monotonic() + 60
while not client.get_job_status("third").is_terminal() and time.monotonic() < until:
    time.sleep(0.2)
print(client.get_job_logs("third"))
"""
    place = r"\S*/working_dir_files/\S*/launch/__init__\.py"
    assert re.search(rf"^found {place} {place}$", head.python(submit), re.MULTILINE)


def test_a_failed_job_shows_its_root_cause_and_exit_code(head):
    place = ("--storage", str(head.storage), "--job", "fourth")
    assert "there is no run t128_6b/nothing in" in head.gpipe("submit", "--run", "t128_6b/nothing", *place, code=2)
    arguments = ("submit", "t12_400m", "--set", "text.corpus=/nowhere", *place)
    printed = head.gpipe(*arguments, code=2)
    lines = printed.splitlines()
    assert lines[-1] == "job fourth failed with exit code 2"
    assert lines[-2].startswith("error: there is no corpus '/nowhere'")
    assert "Traceback" not in printed
    assert "Running entrypoint" not in printed
    assert lines[-2:] == head.gpipe("logs", "fourth", code=2).splitlines()[-2:]
    # the failed job's name is taken; this is reported before any upload
    assert "already has a job fourth" in head.gpipe(*arguments, code=2)


def test_a_wrong_or_missing_token_is_rejected_and_never_shown(head, tmp_path):
    wrong = secrets.token_hex(16)
    arguments = ("submit", "t128_6b", "--storage", str(head.storage))
    printed = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=wrong)
    assert f"the cluster at {head.address} rejects the token from RAY_AUTH_TOKEN" in printed
    assert wrong not in printed
    printed = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=None, HOME=str(tmp_path))
    assert "requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH" in printed


def test_a_token_in_the_default_file_is_used(head, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(head.token)
    printed = head.gpipe("jobs", RAY_AUTH_TOKEN=None, RAY_AUTH_MODE=None, HOME=str(tmp_path))
    assert head.address in printed  # the list needs the token


def test_storage_that_cannot_be_written_is_reported_before_the_upload(head):
    printed = head.gpipe("submit", "t128_6b", "--storage", "/proc/nothing", "--job", "never", code=2)
    assert "error: the head cannot write to storage /proc/nothing" in printed
    assert "submitted" not in printed
    listed = head.gpipe("jobs")
    assert "never" not in listed
    assert "probe" not in listed


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
    submit = f"""
import time
from launch.jobs.client import JobClient
client = JobClient({head.address!r})
client.submit_job(entrypoint="for i in $(seq 300); do echo line $i of many; done", submission_id="fifth")
while not client.get_job_status("fifth").is_terminal():
    time.sleep(0.2)
"""
    head.python(submit)
    proxy = Proxy(head.address, None)
    follow = f"""
import sys
from rich.console import Console
from launch.jobs.client import JobClient
from launch.jobs.logs import follow_job
client = JobClient({proxy.address!r})
print("ready", flush=True); sys.stdin.readline()
print("code", follow_job(client, "fifth", Console(width=100), lost_s=20))
"""
    with head.asked_when_ready(follow) as ask:
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
    follow = f"""
import sys
from rich.console import Console
from launch.jobs.client import UnreachableError, JobClient
from launch.jobs.logs import follow_job
client = JobClient({proxy.address!r})
print("ready", flush=True); sys.stdin.readline()
try:
    follow_job(client, "gone", Console(width=200), lost_s=1.5)
except UnreachableError as error:
    print(error)
"""
    with head.asked_when_ready(follow) as ask:
        proxy.close()
        printed = ask()
    assert "has not answered for 2 s; when it does, follow job gone again: gpipe logs gone" in printed
    assert "Traceback" not in printed


def test_an_archive_too_large_for_a_log_is_rejected_with_its_size(head, finished):
    run, *_ = finished
    printed = head.python(
        f"""
from launch.jobs import remote_archive
from launch.jobs.client import JobClient, JobError
from launch.jobs.remote_script import run_script
request = {{"storage": {str(head.storage)!r}, "job": "second", "extra_folders": [], "limit": 2000}}
try:
    run_script(JobClient({head.address!r}), remote_archive, request, 60)
except JobError as error:
    print(error)
"""
    )
    assert re.search(r"packed at most go through a job's log; copy .*, the largest are .* MiB\)", printed)
    assert json.loads((run / "record.json").read_text())["steps"]
