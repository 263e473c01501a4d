"""A process that has imported other people's packages, and forks a child for each list of tests.

    stdin     {"tests": [...], "files": [...], "limit_s": 60, "stop": true, "seen": null}
    stdout    {"events": [...], "ended": "exit 0", "s": 4.2, "cpu_s": 6.1}

``tests`` are run in their order; None runs all tests of the files. ``seen`` is a file with a byte for each statement
that has been executed (``executed.py``). The child imports the project itself, so that it runs what the files contain.
This file is a script, and needs nothing of this folder.
"""

import ast
import ctypes
import fcntl
import functools
import importlib
import json
import mmap
import os
import re
import resource
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import util
from pathlib import Path

import pytest

TOP = ("suite", "models", "experiments", "launch")

OPTIONS = ["-o", "addopts=", "-q", "-m", "not slow", "-p", "no:logging", "-p", "no:cacheprovider", "-p", "no:xdist"]

SUBREAPER = 36
"""Of prctl: orphans of a child become children of this process, which ends them."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    log = os.open(os.environ["MUTANTS_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[0] = os.getcwd()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    import tests.conftest  # noqa: F401  # its environment, before torch is imported

    _import_packages()
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _import_packages() -> None:
    """Imports what files of the project import from other packages."""
    names: dict[str, set[str]] = {}
    for path in [path for top in (*TOP, "tests") for path in Path(top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name: set() for alias in node.names if alias.name not in names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.setdefault(node.module, set()).update(alias.name for alias in node.names)
    warnings.simplefilter("ignore")
    for name in sorted(names):
        if name.split(".")[0] not in (*TOP, "tests"):
            try:
                module = importlib.import_module(name)
                for attribute in names[name]:
                    getattr(module, attribute, None)  # some packages import a part when it is used
            except Exception as error:
                print(f"{name} is not imported: {error}")
    assert not [name for name in sys.modules if name.split(".")[0] in TOP], "a package imports the project"


def _answer(request: dict) -> dict:
    begin, used = time.monotonic(), _processor_s()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run(request, write)
    os.close(write)
    events, ended = _listen(child, read, begin + request["limit_s"])
    os.close(read)
    _end_processes()
    for path in Path(os.environ["PYTEST_DEBUG_TEMPROOT"]).iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return {"events": events, "ended": ended, "s": time.monotonic() - begin, "cpu_s": _processor_s() - used}


def _processor_s() -> float:
    """Returns the processor's seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _listen(child: int, pipe: int, limit: float) -> tuple[list, str]:
    """Returns the child's events and how it ended."""
    text, ended = b"", ""
    while not ended:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            ended = "limit"
        elif select.select([pipe], [], [], 0.05)[0] and (more := os.read(pipe, 1 << 20)):
            text += more
        else:  # nothing to read, or the child has closed the pipe
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                ended = f"signal {-code}" if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit {code}"
            time.sleep(0.02)
    while select.select([pipe], [], [], 0)[0] and (more := os.read(pipe, 1 << 20)):
        text += more
    return [json.loads(line) for line in text.splitlines() if line.endswith(b"]")], ended


def _end_processes() -> None:
    """Ends what the child has left: workers, servers and forkservers. A resource tracker ends with them."""
    import psutil

    me = psutil.Process()
    for _ in range(50):
        left = me.children(recursive=True)
        for process in left:
            try:
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
            except psutil.Error:
                pass
        psutil.wait_procs(left, 0.2)
        if not me.children():
            return
    for process in me.children(recursive=True):
        process.kill()
        process.wait()


def _run(request: dict, pipe: int) -> None:
    """Runs tests in the child."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    vars(sys.modules["__main__"]).pop("__file__", None)  # workers need not import this file
    _fork_the_forkserver()
    code = 70
    try:
        options = [*OPTIONS, *(["-x"] if request["stop"] else [])]
        code = int(pytest.main([*options, *request["files"]], plugins=[Plugin(request, pipe)]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_the_forkserver() -> None:
    """Forks the process that becomes multiprocessing's forkserver, which then need not import torch again. A second
    forkserver of the same tests is started as usual."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = [os.fork()]
    if waiting[0] == 0:
        ours.close()
        _become_forkserver(theirs)
    theirs.close()
    as_usual = util.spawnv_passfds

    def spawnv_passfds(path: str, arguments: list[str], numbers: Sequence[int]) -> int:
        if not waiting or "multiprocessing.forkserver" not in arguments[-1]:
            return as_usual(path, arguments, numbers)
        numbers = [0, 1, 2, *numbers]
        process = {"environment": dict(os.environ), "folder": os.getcwd(), "numbers": numbers, "code": arguments[-1]}
        process["blocked"] = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        socket.send_fds(ours, [json.dumps(process).encode()], numbers)
        ours.close()
        return waiting.pop()

    util.spawnv_passfds = spawnv_passfds


def _become_forkserver(pipe: socket.socket) -> None:
    """Waits for the files, the environment and the code of a forkserver, and runs it."""
    message, received, *_ = socket.recv_fds(pipe, 1 << 18, 20)
    pipe.close()
    if message:
        process = json.loads(message)
        apart = [fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in received]
        os.closerange(3, 500)
        for number, wanted in zip(apart, process["numbers"], strict=True):
            os.dup2(number, wanted)
            os.close(number)
        os.environ.clear()
        os.environ.update(process["environment"])
        os.chdir(process["folder"])
        signal.pthread_sigmask(signal.SIG_SETMASK, process["blocked"])
        sys.argv = ["-c"]
        exec(process["code"], {"__name__": "__main__"})
    os._exit(0)


class Plugin:
    """Chooses and orders the tests, and tells what each one does.

    ["start", test]
    ["failed", test, phase, error]
    ["done", test, seconds, statements]    statements: those executed since the last event
    ["imports", statements]                executed while files were collected
    ["shared", test, statements]           executed by fixtures of a module or session that the test uses
    ["broken", file, error]                a file that could not be collected
    """

    def __init__(self, request: dict, pipe: int) -> None:
        self._tests, self._pipe = request["tests"], pipe
        self._seen = None
        if request["seen"]:
            with open(request["seen"], "r+b") as file:
                self._seen = mmap.mmap(file.fileno(), 0)
        self._shared: dict[str, set[int]] = {}
        self._seconds: dict[str, float] = {}

    def _tell(self, *event: object) -> None:
        text = json.dumps(event).encode() + b"\n"
        while text:
            text = text[os.write(self._pipe, text) :]

    def _take(self) -> list[int]:
        """Returns the statements that were executed since the last call."""
        if self._seen is None:
            return []
        content = self._seen[:]
        self._seen[:] = bytes(len(content))
        return [found.start() for found in re.finditer(rb"\x01", content)]

    def pytest_collection(self) -> None:
        """Examples of hypothesis are the same in each run. The tests' conftest has loaded its own profile before."""
        import hypothesis

        hypothesis.settings.register_profile("mutants", hypothesis.settings.default, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutants")
        self._take()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list) -> None:
        if self._tests is not None:
            by_name = {item.nodeid: item for item in items}
            items[:] = [by_name[name] for name in self._tests if name in by_name]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell("broken", report.nodeid, str(report.longrepr)[-300:])

    def pytest_collection_finish(self) -> None:
        self._tell("imports", self._take())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        if self._seen is None or fixturedef.scope == "function":
            return (yield)
        before = self._take()
        try:
            return (yield)
        finally:
            own = self._take()
            self._shared.setdefault(fixturedef.argname, set()).update(own)
            for at in (*before, *own):
                self._seen[at] = 1

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("start", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._tell("failed", report.nodeid, report.when, (crash.message if crash else str(report.longrepr))[:300])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell("done", nodeid, round(self._seconds.get(nodeid, 0.0), 3), self._take())
        if self._seen is not None:
            _clear_caches()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for item in session.items if self._seen is not None else []:
            used = [self._shared[name] for name in getattr(item, "fixturenames", ()) if name in self._shared]
            self._tell("shared", item.nodeid, sorted(set[int]().union(*used)))


def _clear_caches() -> None:
    """Lets the next test execute what a cached function has done for this one."""
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] in (*TOP, "tests"):
            for value in [*vars(module).values()]:
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


if __name__ == "__main__":
    main()
