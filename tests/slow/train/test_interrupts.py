"""Interrupts at random moments of whole runs: one sentence, exit code 130 or 143, no process left, and it can go on.

A moment is a part of the run and a share of the seconds that this part takes undisturbed. A save and the validation are
short parts: each begins with a sign in the run's files. Before the first line of the command line's own code, a signal
ends the process as by default.
"""

import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import psutil
import pytest

from launch.worker.heartbeat import read_heartbeats
from suite.training.checkpoint.storage import BEGUN, MANIFEST
from tests.launch.command_line import SMALL_1F1B, gpipe, losses, only_run
from tests.slow.interrupted_command import GONE_S, SAVED_S, Command
from tests.slow.running import LONG_S

SEED = 17
SETTINGS = f"{SMALL_1F1B} train.steps=30 pipeline.stages=2"
RUN = ["experiment", "t24_1_3b_wide", "--scale", "laptop", "--set", SETTINGS]

PARTS = ("start", "preparation", "measuring", "workers", "training", "save", "end", "validation", "summary")
"""``save`` is a part of ``training``: the first save."""
FRESH = PARTS[:3]
"""Parts of a run without cached data and measurements."""

PRINTED = {"preparation": "reading and cleaning", "measuring": "measuring the layers", "workers": "folder: "}
"""What tells that a part has begun."""


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


def random_moments():
    """Yields a moment in every part with both launchers, with random signals and shares."""
    chance = random.Random(SEED)
    for part, launcher in product(PARTS, ("local", "ray")):
        number, how = chance.choice((signal.SIGINT, signal.SIGTERM)), chance.choice(("once", "twice", "group"))
        yield Moment(launcher, part, chance.random(), number, how)


def is_saving(folder):
    """Returns whether a save is in progress: a checkpoint's folder has a mark and no manifest yet."""
    marked = {path.parent for path in folder.glob(f"runs/*/*/checkpoints/*/{BEGUN}*")}
    return any(not (path / MANIFEST).exists() for path in marked)


def is_validating(folder):
    """Returns whether a worker validates: by its heartbeat it runs a forward without a step, after the last step."""
    return any(
        heartbeat.steps_done == 30 and heartbeat.step is None and re.fullmatch(r"open|F\d+.*", heartbeat.action)
        for path in folder.glob("runs/*/*/heartbeats.json")
        for heartbeat in read_heartbeats(path, 1)
    )


def has_reached(command, part):
    """Returns whether a run has reached a part."""
    folder, printed = command.folder, command.printed
    metrics = list(folder.glob("runs/*/*/metrics.jsonl"))
    if part == "start":
        return command.handles_signals()
    if part in PRINTED:
        return PRINTED[part] in printed
    if part == "training":
        return bool(metrics) and metrics[0].stat().st_size > 0
    stepped = bool(metrics) and '"step": 30,' in metrics[0].read_text()
    if part == "save":
        return is_saving(folder) or stepped
    if part == "end":
        return stepped
    recorded = bool(list(folder.glob("runs/*/*/record.json")))
    if part == "validation":
        return recorded or is_validating(folder)
    return recorded


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """An undisturbed run with each launcher: its folder, and the seconds of each part."""

    @cache
    def of(launcher):
        folder = tmp_path_factory.mktemp(launcher)
        command = Command(folder, [*RUN, "--launcher", launcher])
        begins = {}
        try:
            for part in PARTS:
                command.wait_for(lambda part=part: has_reached(command, part))
                begins[part] = time.monotonic()
                if part == "save":
                    command.wait_for(lambda: not is_saving(folder))
                    save_s = time.monotonic() - begins.pop(part)
            assert command.process.wait(LONG_S) == 0, command.printed
        finally:
            command.end()
        ends = [*list(begins.values())[1:], time.monotonic()]
        lengths = {part: end - begin for (part, begin), end in zip(begins.items(), ends, strict=True)}
        lengths["save"] = save_s
        print(launcher, {part: round(seconds, 2) for part, seconds in lengths.items()})
        return folder, lengths

    return of


@pytest.mark.parametrize("moment", random_moments(), ids=str)
def test_an_interrupted_run_ends_with_one_sentence_and_can_be_resumed(moment, undisturbed, tmp_path, ended):
    reference, lengths = undisturbed(moment.launcher)
    if moment.part not in FRESH:
        shutil.copytree(reference / ".cache", tmp_path / ".cache")
    command = ended(Command(tmp_path, [*RUN, "--launcher", moment.launcher]))
    command.wait_for(lambda: has_reached(command, moment.part))
    time.sleep(moment.share * lengths[moment.part])
    saves = moment.number == signal.SIGTERM and moment.how != "twice" and moment.part in PARTS[4:]
    began, gone_s = command.interrupt(moment.number, moment.how), SAVED_S if saves else GONE_S
    code, seconds = command.check_end(began, "done: 30 steps", gone_s)
    last = command.printed.splitlines()[-1]
    print(f"{moment}: exit code {code}, all gone after {seconds:.1f} s; {last}")
    if code == 0:
        return
    resumed = re.search(r"gpipe resume (\S+) continues from (?:the checkpoint of step (\d+)|its beginning)", last)
    if "the run is finished: " in last:
        return
    if resumed is None:
        assert "run the same command again to restart" in last
        assert not list(tmp_path.glob("runs/*/*/experiment.toml"))
        return
    run, step = Path(resumed[1]), int(resumed[2] or 0)
    if (run / "record.json").exists():
        return  # it had finished before the signal
    printed = gpipe(tmp_path, "resume", str(run), "--launcher", "local", "--set", f"train.steps={max(step + 2, 30)}")
    assert f"resumed at step {step}" in printed or (step == 0 and "training starts anew" in printed), printed
    assert losses(run)[:30] == losses(only_run(reference))


LINES = 300
"""Lines to translate: enough to be interrupted meanwhile."""


def has_workers(command):
    """Returns whether there is a process that multiprocessing's forkserver forked."""
    try:
        children = psutil.Process(command.process.pid).children(recursive=True)
        servers = {child.pid for child in children if "multiprocessing.forkserver" in " ".join(child.cmdline())}
        return any(child.ppid() in servers for child in children)
    except psutil.Error:  # a process ended meanwhile
        return False


def prints(text):
    """Returns a condition: the command has printed a text."""
    return lambda command: text in command.printed


@dataclass(frozen=True)
class OtherCommand:
    """A command other than ``experiment``."""

    arguments: list[str]
    has_begun: Callable[[Command], bool] | None
    """The condition after which it is interrupted; None: it has connected to the cluster."""
    within_s: float
    """Seconds after the condition; one moment is in each third."""
    done: str | None
    """A pattern in its output when it has finished; None if it cannot finish."""


OTHERS = {
    "plan": OtherCommand(
        ["plan", "t24_1_3b_wide", "--scale", "laptop", "--set", SETTINGS], prints("measuring the layers"), 8.0,
        "plan of t24_1_3b_wide on",
    ),
    "table": OtherCommand(["table", "2"], has_workers, 20.0, "written: "),
    "sweep-local": OtherCommand(["sweep", "temperature", "--scale", "tiny"], prints(": started"), 20.0, "report: "),
    "sweep-ray": OtherCommand(
        ["sweep", "temperature", "--scale", "tiny", "--launcher", "ray"], prints(": started"), 20.0, "report: "
    ),
    "score": OtherCommand(
        ["score", "", "--set", "score.max_pairs=200"], has_workers, 6.0, "sentences a second; scores: "
    ),
    "translate": OtherCommand(
        ["translate", "", "--to", "de", "--", "\n".join(["File not found"] * LINES)], has_workers, 3.0,
        rf"(.*\n){{{LINES}}}",
    ),
    "submit": OtherCommand(["submit", "t24_1_3b_wide", "--scale", "laptop"], None, 8.0, None),
}  # fmt: skip


@pytest.fixture
def silent_cluster():
    """A cluster that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_command_ends_with_one_sentence(name, undisturbed, tmp_path, ended, silent_cluster):
    """Three moments each; the command may finish before the later ones, but not before all of them."""
    other, codes, connections = OTHERS[name], [], []
    arguments = list(other.arguments)
    if name in ("score", "translate"):
        reference, _ = undisturbed("local")
        arguments[1] = str(only_run(reference))
    if name == "submit":
        arguments += ["--address", f"http://127.0.0.1:{silent_cluster.getsockname()[1]}"]

    def connected():
        try:
            connections.append(silent_cluster.accept()[0])  # kept open
        except BlockingIOError:
            return False
        return True

    def has_begun():
        return connected() if other.has_begun is None else other.has_begun(command)

    for at in range(3):
        folder = tmp_path / str(at)
        folder.mkdir()
        if name in ("score", "translate"):
            (folder / ".cache").symlink_to(reference / ".cache")
        chance = random.Random(f"{SEED}-{name}-{at}")
        while connected():  # of the previous command
            pass
        command = ended(Command(folder, arguments))
        command.wait_for(has_begun)
        assert command.process.poll() is None, f"ended before it could be interrupted\n{command.printed}"
        time.sleep((at + chance.random()) / 3 * other.within_s)
        number, how = chance.choice((signal.SIGINT, signal.SIGTERM)), chance.choice(("once", "twice", "group"))
        code, seconds = command.check_end(command.interrupt(number, how), done=other.done)
        codes.append(code)
        print(f"{name}: exit code {code}, all gone after {seconds:.1f} s; {command.printed.splitlines()[-1]}")
    for connection in connections:
        connection.close()
    assert {130, 143} & {*codes}, f"{name} was never interrupted; its moments come too late"
