"""Runs as jobs on a cluster: a real head, started here with a token of its own, and ended with all its processes."""

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

from tests.launch.train.test_end_to_end import SMALL, command, losses
from tests.slow.jobs_head import Head

ROOT = Path(__file__).parents[3]
KEY = f"key-{secrets.token_hex(12)}"
"""What nobody may find anywhere."""
TINY = f"{SMALL.replace('checkpoint_every=3', 'checkpoint_every=5')} pipeline.stages=1 tracking.wandb=disabled"


def answer_to_interrupts():
    """A shell starts what runs in its background deaf to them, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    one = Head(tmp_path_factory.mktemp("laptop"))
    try:
        one.wait()
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def stopped(head):
    """A run that was submitted, followed, left by an interrupt, and stopped: what was printed at each."""
    settings = f"{TINY} train.steps=100000"
    follower = subprocess.Popen(
        command("submit", "t24_1_3b_wide", "--address", head.address, "--scale", "laptop", "--set", settings,
                "--storage", str(head.storage), "--job", "first"),
        cwd=head.folder, env=head.variables(WANDB_API_KEY=KEY), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True, preexec_fn=answer_to_interrupts,
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
    told = head.gpipe("stop", "first")
    (run,) = head.storage.glob("runs/*/*")
    return run, followed, listed, told


@pytest.fixture(scope="module")
def finished(head, stopped):
    """The same run, taken up again by another job and followed to its end, then fetched."""
    run, *_ = stopped
    steps = len(losses(run)) + 20
    id = f"{run.parent.name}/{run.name}"
    printed = head.gpipe(
        "submit", "--run", id, "--set", f"train.steps={steps}", "--storage", str(head.storage), "--job", "second"
    )  # fmt: skip
    return run, steps, printed, head.gpipe("fetch", "second")


def test_what_goes_up_is_told_first_and_the_job_outlives_its_follower(head, stopped):
    run, followed, listed, told = stopped
    lines = followed.splitlines()
    assert re.match(r"package: \d+ tracked files, \d\.\d\d MiB, commit [0-9a-f]+", lines[0])
    assert any(re.match(r"all \d\d+ pinned packages are installed on the cluster", one) for one in lines)
    assert f"storage: {head.storage}" in lines
    assert f"folder: {run}" in lines
    assert "interrupted; job first keeps running" in lines
    for verb in ("logs", "stop", "fetch"):
        assert f"make {verb} JOB=first ADDRESS={head.address}" in followed
    assert re.search(r"first .* running", listed)
    assert "job first is stopped" in told
    assert f"make submit RUN={run.parent.name}/{run.name} STORAGE={head.storage}" in told


def test_a_stopped_run_is_taken_up_by_another_job_and_fetched(head, finished):
    run, steps, printed, fetched = finished
    assert "resumed at step" in printed
    assert f"step {steps}/{steps}  loss" in printed  # drawn from the marked lines of the job's log
    assert "@gpipe" not in printed
    assert printed.splitlines()[-1] == "job second is done"
    here = head.folder / "runs" / run.parent.name / run.name
    assert f"folder: {here}" in fetched
    for name in ("record.json", "metrics.jsonl", "plan.txt", "timeline.png", "logs/stage-0-0.log"):
        assert (here / name).read_bytes() == (run / name).read_bytes()
    assert not list(here.rglob("*.safetensors"))
    assert len(losses(here)) == steps
    assert "resumed at step" in (here / "job.log").read_text()


def test_a_second_fetch_brings_what_came_since_and_the_first_job_of_the_run_the_same(head, finished):
    run, *_ = finished
    for job in ("second", "first"):
        assert f"folder: {head.folder / 'runs' / run.parent.name / run.name}" in head.gpipe("fetch", job)


def test_the_doctor_goes_to_the_head_and_ends_with_its_table(head):
    address = head.address.removeprefix("http://")  # as it may be typed
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


def test_the_key_comes_to_driver_and_workers_by_memory(head):
    work = (
        "import hashlib, os, ray, launch; from launch.backends import secrets\n"
        "assert secrets.claim_secret() is None and 'GPIPE_SECRET' not in os.environ\n"
        "ray.init(log_to_driver=False); keeper = secrets.serve_secret()\n"
        "os.environ.pop(secrets.SECRET)\n"
        "def worker():\n"
        "    secrets.load_secret(); return hashlib.sha256(os.environ[secrets.SECRET].encode()).hexdigest()\n"
        "print('found', ray.get(ray.remote(worker).remote()), launch.__file__)\n"
    )
    submit = f"""
import shlex, tempfile, time, hashlib, os
from pathlib import Path
from launch.jobs import secrets
from launch.jobs.client import JobClient
from launch.jobs.source_package import checkout, pack
door = JobClient({head.address!r})
with tempfile.TemporaryDirectory() as place:
    package = pack(checkout(), Path(place) / "package.zip")
    door.submit_job(
        entrypoint="exec {sys.executable} -c " + shlex.quote({work!r}), submission_id="third",
        runtime_env={{"working_dir": str(package.archive), "env_vars": secrets.stash_secret(door)}},
    )
until = time.monotonic() + 60
while not door.get_job_status("third").is_terminal() and time.monotonic() < until:
    time.sleep(0.2)
print(door.get_job_logs("third"))
print("wanted", hashlib.sha256(os.environ["WANDB_API_KEY"].encode()).hexdigest())
"""
    said = head.python(submit, WANDB_API_KEY=KEY)
    (found,), (wanted,) = re.findall(r"^found (\w+)", said, re.MULTILINE), re.findall(r"wanted (\w+)", said)
    assert found == wanted
    assert re.search(r"^found \w+ .*/working_dir_files/.*/launch/__init__.py", said, re.MULTILINE)  # the package's code


def test_a_failing_job_shows_its_first_cause_and_exit_code(head):
    arguments = ("submit", "--run", "t128_6b/nothing", "--storage", str(head.storage), "--job", "fourth")
    said = head.gpipe(*arguments, code=2)
    lines = said.splitlines()
    assert lines[-1] == "job fourth failed with exit code 2"
    assert lines[-2].startswith("error: no run 't128_6b/nothing'")
    assert "Traceback" not in said
    assert "Running entrypoint" not in said
    assert lines[-2:] == head.gpipe("logs", "fourth", code=2).splitlines()[-2:]
    # a name that is taken, here by the job that failed, is told before anything goes up
    assert "already has a job fourth" in head.gpipe(*arguments, code=2)


def test_a_wrong_and_a_missing_token_are_refused_and_never_shown(head, tmp_path):
    wrong = secrets.token_hex(16)
    arguments = ("submit", "t128_6b", "--storage", str(head.storage))
    said = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=wrong)
    assert f"the cluster at {head.address} rejects the token from RAY_AUTH_TOKEN" in said
    assert wrong not in said
    said = head.gpipe(*arguments, code=2, RAY_AUTH_TOKEN=None, HOME=str(tmp_path))
    assert "requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH" in said


def test_a_token_in_its_usual_place_is_used_unasked(head, tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(head.token)
    said = head.gpipe("jobs", RAY_AUTH_TOKEN=None, RAY_AUTH_MODE=None, HOME=str(tmp_path))
    assert head.address in said  # the list itself, which the head gives to nobody without the token


def test_storage_that_cannot_be_written_is_told_by_the_probe_and_nothing_goes_up(head):
    said = head.gpipe("submit", "t128_6b", "--storage", "/proc/nothing", "--job", "never", code=2)
    assert "error: the head cannot write to storage /proc/nothing" in said
    assert "submitted" not in said
    listed = head.gpipe("jobs")
    assert "never" not in listed
    assert "probe" not in listed


class Line:
    """A line to the head that can be cut: each connection ends after ``most`` bytes from there."""

    def __init__(self, address, most):
        self._to, self.most = int(address.rpartition(":")[2]), most
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self.cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._copy, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._copy, args=(far, near, self.most), daemon=True).start()

    def _copy(self, source, to, most):
        passed = 0
        with suppress(OSError):
            while data := source.recv(512):
                if most is not None and (passed := passed + len(data)) > most:
                    self.cut += 1
                    self.most = None  # the next ones are whole
                    break
                to.sendall(data)
        for one in (source, to):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._door.close()


def test_a_lost_connection_is_taken_up_again_and_each_line_comes_once(head):
    submit = f"""
import time
from launch.jobs.client import JobClient
door = JobClient({head.address!r})
door.submit_job(entrypoint="for i in $(seq 300); do echo line $i of many; done", submission_id="fifth")
while not door.get_job_status("fifth").is_terminal():
    time.sleep(0.2)
"""
    head.python(submit)
    line = Line(head.address, None)
    follow = f"""
import sys
from rich.console import Console
from launch.jobs.client import JobClient
from launch.jobs.logs import follow_job
door = JobClient({line.address!r})
print("ready", flush=True); sys.stdin.readline()
print("code", follow_job(door, "fifth", Console(width=100), lost_s=20))
"""
    with head.asked_when_ready(follow) as ask:
        line.most = 2500
        said = ask()
    line.close()
    assert line.cut == 1
    assert f"lost the connection to {line.address}" in said
    assert "connected again" in said
    assert re.findall(r"^line (\d+) of many$", said, re.MULTILINE) == [str(at) for at in range(1, 301)]
    assert said.splitlines()[-1] == "code 0"


def test_a_cluster_that_stays_away_is_told_in_a_sentence(head):
    line = Line(head.address, None)
    follow = f"""
import sys
from rich.console import Console
from launch.jobs.client import UnreachableError, JobClient
from launch.jobs.logs import follow_job
door = JobClient({line.address!r})
print("ready", flush=True); sys.stdin.readline()
try:
    follow_job(door, "gone", Console(width=200), lost_s=1.5)
except UnreachableError as error:
    print(error)
"""
    with head.asked_when_ready(follow) as ask:
        line.close()
        said = ask()
    assert "has not answered for 2 s; when it does, follow job gone again: make logs JOB=gone" in said
    assert "Traceback" not in said


def test_an_archive_too_large_for_a_log_is_refused_with_its_size(head, finished):
    run, *_ = finished
    said = head.python(
        f"""
from pathlib import Path
from launch.jobs import remote_archive
from launch.jobs.client import JobClient, JobError
from launch.jobs.remote_script import run_script
asked = {{"storage": {str(head.storage)!r}, "job": "second", "beside": [], "limit": 2000}}
try:
    run_script(JobClient({head.address!r}), Path(remote_archive.__file__), "GPIPE_PACK", asked, 60)
except JobError as error:
    print(error)
"""
    )
    assert re.search(r"packed at most go through a job's log; copy .*, the largest are .* MiB\)", said)
    assert json.loads((run / "record.json").read_text())["steps"]
