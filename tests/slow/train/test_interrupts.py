"""Interrupts at moments drawn at random over whole runs: one sentence, exit code 130, no process left, and the run goes
on where something was saved.

A moment is a part of the run and a share of the seconds that this part takes undisturbed. A save and the validation are
short parts: each begins with a sign in the run's files. Before the suite's first line
the system's own rule holds: the process ends by the signal.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from launch.worker.heartbeat import HeartbeatWriter, read_heartbeat
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.worker_status import WorkerStatus
from suite.pipeline.schedule.action import Action
from suite.training.checkpoint.storage import BEGUN, MANIFEST
from tests.launch.train.test_end_to_end import SMALL, environment, gpipe

SEED, COUNT = 17, int(os.environ.get("GPIPE_INTERRUPTS", "40"))

SETTINGS = f"{SMALL} train.steps=30 pipeline.stages=2 pipeline.schedule=1f1b"
RUN = ["experiment", "t24_1_3b_wide", "--scale", "laptop", "--set", SETTINGS]

GONE_S = 5.0

PARTS = ("start", "preparation", "measuring", "workers", "training", "save", "end", "validation", "summary")
"""``save`` is a part of ``training``: the first save that is seen under way."""
FRESH = PARTS[:3]
"""Parts that a run passes only where nothing is prepared and measured yet."""

MARK = "GPIPE_TEST_MARK"
"""Environment variable by which all processes of one command are found, whoever their parents are."""


@dataclass(frozen=True)
class Moment:
    """When and how a run is interrupted."""

    launcher: str
    part: str
    share: float
    number: signal.Signals
    how: str
    """once, twice, or group: to all processes of the command's process group."""

    def __str__(self):
        return f"{self.launcher}-{self.part}-{self.share:.2f}-{self.number.name}-{self.how}"


def drawn(count):
    """Returns moments: both launchers, every part, signal and way in turn, each at a random share."""
    chance = random.Random(SEED)
    moments = []
    for at in range(count):
        number, how = chance.choice((signal.SIGINT, signal.SIGTERM)), chance.choice(("once", "twice", "group"))
        launcher, part = ("spawn", "ray")[at % 2], PARTS[at // 2 % len(PARTS)]
        moments.append(Moment(launcher, part, chance.random(), number, how))
    return moments


class Command:
    """One command line in a session of its own, all its processes marked."""

    def __init__(self, folder, arguments, program=(sys.executable, "-m", "launch.cli")):
        self.folder, self.mark = folder, uuid4().hex
        self.log = folder / f"printed-{self.mark}"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*program, *arguments], cwd=folder, env=environment() | {MARK: self.mark}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def printed(self):
        return self.log.read_text(errors="replace")

    def until(self, reached, seconds=400):
        """Waits for something, or for the end of the command."""
        until = time.monotonic() + seconds
        while not reached() and self.process.poll() is None:
            assert time.monotonic() < until, self.printed
            time.sleep(0.01)

    def handles(self):
        """Whether the suite's first line has run: SIGTERM is caught."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return False
        caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def interrupt(self, number, how):
        """Sends a signal, and returns when it was sent."""
        began = time.monotonic()
        if how == "group":
            os.killpg(self.process.pid, number)
            return began
        for _ in range(1 + (how == "twice")):
            os.kill(self.process.pid, number)
            time.sleep(0.15 * (how == "twice"))
        return began

    def left(self):
        """Returns the processes that carry the mark."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(path.name)))
            except (OSError, psutil.Error):
                continue
        return [process for process in found if running(process)]

    def judge(self, began, done=None):
        """Asserts that the command ended as an interrupted one does; returns its exit code, and the seconds until the
        last process was gone. ``done`` is a pattern of what a command prints that was done already; without it the
        command cannot be done."""
        code = self.process.wait(60)
        while (left := self.left()) and time.monotonic() < began + GONE_S + 10:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        printed = self.printed
        assert not left, [(process.pid, process.cmdline()) for process in left]
        assert seconds < GONE_S, f"gone after {seconds:.1f} s\n{printed}"
        assert "Traceback" not in printed, printed
        if done is not None and code == 0:
            assert re.search(done, printed), printed
            return code, seconds
        assert code == 130, (code, printed)
        assert len(re.findall(r"^interrupted; ", printed, re.MULTILINE)) == 1, printed
        assert printed.splitlines()[-1].startswith("interrupted; "), printed
        return code, seconds

    def end(self):
        """Leaves nothing behind, however a test ended."""
        for process in [*self.left()]:
            process.kill()
        self.process.wait(30)


def running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
def commands():
    """Starts commands and ends them."""
    started = []

    def start(folder, arguments, **options):
        started.append(Command(folder, arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def saves(folder):
    """Whether a save is under way: a checkpoint's folder has a mark and no manifest yet."""
    marked = {path.parent for path in folder.glob(f"runs/*/*/checkpoints/*/{BEGUN}*")}
    return any(not (path / MANIFEST).exists() for path in marked)


def validates(folder):
    """Whether a worker's heartbeat says that it validates: it runs a forward of no step, after the last step."""
    heartbeats = [
        read_heartbeat(path, 0, stage, 1) for path in folder.glob("runs/*/*/heartbeats") for stage in range(2)
    ]
    return any(
        heartbeat.steps_done == 30 and heartbeat.step is None and re.fullmatch(r"open|F\d+.*", heartbeat.action)
        for heartbeat in heartbeats
        if heartbeat is not None
    )


def test_signs_of_a_save_and_of_the_validation(tmp_path):
    run = tmp_path / "runs/name/id"
    save = run / "checkpoints/00000003"
    save.mkdir(parents=True)
    assert not saves(tmp_path)
    (save / f"{BEGUN}1").touch()
    assert saves(tmp_path)
    (save / MANIFEST).touch()
    assert not saves(tmp_path)
    status, found = WorkerStatus(), []
    with HeartbeatWriter(run / "heartbeats", RankCoord(1, 2, 1), 1, status):
        status.begin(Action("F", 0), 29)
        found.append(validates(tmp_path))
        status.steps_done = 30
        for what in ("save", "end", "open", Action("F", 2), "close"):
            status.begin(what, None)
            found.append(validates(tmp_path))
    assert found == [False, False, False, True, True, False]
    assert not validates(tmp_path)


def reached(command, part):
    """Whether a run is in a part of it, or beyond."""
    folder, printed = command.folder, command.printed
    metrics = list(folder.glob("runs/*/*/metrics.jsonl"))
    if part == "start":
        return command.handles()
    if part == "preparation":
        return "reading and cleaning" in printed
    if part == "measuring":
        return "measuring the layers" in printed
    if part == "workers":
        return "folder: " in printed
    if part == "training":
        return bool(metrics) and metrics[0].stat().st_size > 0
    stepped = bool(metrics) and '"step": 30,' in metrics[0].read_text()
    if part == "save":
        return saves(folder) or stepped
    if part == "end":
        return stepped
    recorded = bool(list(folder.glob("runs/*/*/record.json")))
    if part == "validation":
        return recorded or validates(folder)
    return recorded


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run by each launcher: seconds of each part, and the folder with all that it prepared."""
    found = {}

    def of(launcher):
        if launcher in found:
            return found[launcher]
        folder = tmp_path_factory.mktemp(launcher)
        command = Command(folder, [*RUN, "--launcher", launcher])
        begins = {}
        try:
            for part in PARTS:
                command.until(lambda part=part: reached(command, part))
                begins[part] = time.monotonic()
                if part == "save":
                    command.until(lambda: not saves(folder))
                    save_s = time.monotonic() - begins.pop(part)
            assert command.process.wait(120) == 0, command.printed
        finally:
            command.end()
        ends = [*list(begins.values())[1:], time.monotonic()]
        lengths = {part: end - begin for (part, begin), end in zip(begins.items(), ends, strict=True)}
        found[launcher] = folder, lengths | {"save": save_s}
        print(launcher, {part: round(seconds, 2) for part, seconds in found[launcher][1].items()})
        return found[launcher]

    return of


@pytest.mark.parametrize("moment", drawn(COUNT), ids=str)
def test_a_run_that_is_interrupted_leaves_one_sentence_and_goes_on(moment, whole, tmp_path, commands):
    reference, lengths = whole(moment.launcher)
    if moment.part not in FRESH:
        shutil.copytree(reference / ".cache", tmp_path / ".cache")
    command = commands(tmp_path, [*RUN, "--launcher", moment.launcher])
    command.until(lambda: reached(command, moment.part))
    time.sleep(moment.share * lengths[moment.part])
    code, seconds = command.judge(command.interrupt(moment.number, moment.how), done="done: 30 steps")
    last = command.printed.splitlines()[-1]
    print(f"{moment}: exit code {code}, all gone after {seconds:.1f} s; {last}")
    if code == 0:
        return
    resumed = re.search(r"make resume RUN=(\S+) continues from (?:the checkpoint of step (\d+)|step 0)", last)
    if "the run is finished: " in last:
        return
    if resumed is None:
        assert "run the same command again to restart" in last
        assert not list(tmp_path.glob("runs/*/*/experiment.toml"))
        return
    run, step = Path(resumed[1]), int(resumed[2] or 0)
    if (run / "record.json").exists():
        return  # it was done when the signal came
    said = gpipe(tmp_path, "resume", str(run), "--launcher", "spawn", "--set", f"train.steps={max(step + 2, 30)}")
    assert f"resumed at step {step}" in said or (step == 0 and "training starts at step 0" in said), said
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    (undisturbed,) = reference.glob("runs/*/*/metrics.jsonl")
    assert losses[:30] == [json.loads(line)["loss"] for line in undisturbed.read_text().splitlines()]


LINES = 300
"""Lines that a command translates: enough that it is struck while it does."""


def has_workers(command):
    """Whether a process runs that multiprocessing's forkserver forked."""
    try:
        found = {one.pid: one for one in psutil.Process(command.process.pid).children(recursive=True)}
        servers = {pid for pid, one in found.items() if "multiprocessing.forkserver" in " ".join(one.cmdline())}
        return any(one.ppid() in servers for one in found.values())
    except psutil.Error:  # a process ended meanwhile
        return False


def prints(text):
    """Returns a sign: the command has printed a text."""
    return lambda command: text in command.printed


@dataclass(frozen=True)
class Other:
    """A command other than ``experiment``."""

    arguments: list[str]
    begun: Callable[[Command], bool] | None
    """The sign of the part that is interrupted; None where it is a connection to the cluster."""
    within_s: float
    """Seconds from the sign from which the moments are drawn, one from each third."""
    done: str | None
    """A pattern of what it prints when it is done; None for what cannot be done."""


OTHERS = {
    "plan": Other(
        ["plan", "t24_1_3b_wide", "--scale", "laptop", "--set", SETTINGS], prints("measuring the layers"), 8.0,
        "plan of t24_1_3b_wide on",
    ),
    "table": Other(["table", "2"], has_workers, 20.0, "written: "),
    "bench": Other(["bench", "sleeping"], has_workers, 20.0, "written: "),
    "sweep-spawn": Other(["sweep", "bilingual", "--scale", "tiny"], prints(": begun"), 20.0, "report: "),
    "sweep-ray": Other(
        ["sweep", "bilingual", "--scale", "tiny", "--launcher", "ray"], prints(": begun"), 20.0, "report: "
    ),
    "score": Other(["score", "", "--set", "score.max_pairs=200"], has_workers, 6.0, "sentences a second; scores: "),
    "translate": Other(
        ["translate", "", "--to", "de", "--", "\n".join(["File not found"] * LINES)], has_workers, 3.0,
        rf"(.*\n){{{LINES}}}",
    ),
    "submit": Other(["submit", "t24_1_3b_wide", "--scale", "laptop"], None, 8.0, None),
}  # fmt: skip


@pytest.fixture
def silent():
    """A cluster that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OTHERS)
def test_so_does_every_other_command(name, whole, tmp_path, commands, silent):
    """Three moments of each; the command may be done before the later ones, but not before all of them."""
    other, codes, connections = OTHERS[name], [], []
    arguments = list(other.arguments)
    if name in ("score", "translate"):
        reference, _ = whole("spawn")
        (run,) = reference.glob("runs/*/*")
        arguments[1] = str(run)
    if name == "submit":
        arguments += ["--address", f"http://127.0.0.1:{silent.getsockname()[1]}"]

    def connected():
        try:
            connections.append(silent.accept()[0])  # kept open
        except BlockingIOError:
            return False
        return True

    def begun():
        return connected() if other.begun is None else other.begun(command)

    for at in range(3):
        folder = tmp_path / str(at)
        folder.mkdir()
        if name in ("score", "translate"):
            (folder / ".cache").symlink_to(reference / ".cache")
        chance = random.Random(f"{SEED}-{name}-{at}")
        while connected():  # of the command before
            pass
        command = commands(folder, arguments)
        command.until(begun)
        assert command.process.poll() is None, f"ended before its sign came\n{command.printed}"
        time.sleep((at + chance.random()) / 3 * other.within_s)
        number, how = chance.choice((signal.SIGINT, signal.SIGTERM)), chance.choice(("once", "twice", "group"))
        code, seconds = command.judge(command.interrupt(number, how), done=other.done)
        codes.append(code)
        print(f"{name}: exit code {code}, all gone after {seconds:.1f} s; {command.printed.splitlines()[-1]}")
    for connection in connections:
        connection.close()
    assert 130 in codes, f"{name} was never interrupted; its moments come too late"
