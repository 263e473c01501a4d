"""An interrupt ends a command at any moment: one sentence, exit code 130, and no process left.

SIGINT or SIGTERM --> main thread        plain worker processes are killed; KeyboardInterrupt unwinds the command
                  \\-> thread "interrupt"  what has not unwound after UNWIND_S is ended as it is: a library may hold the
                                         main thread, or swallow a KeyboardInterrupt

Further signals change nothing. Processes that outlive the command are killed: all descendants are looked for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch.runs import JOB

if TYPE_CHECKING:
    import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A terminal and ``make`` send the first, a scheduler the second."""

EXIT_CODE = 130

UNWIND_S = 2.5
"""Seconds from the signal to the forced end."""

JOB_STOP_S = 60
"""Seconds between the signal that asks a job's driver to end and the one that ends it. The driver has half of them for
its workers, and the rest for the last copy of its runs."""

RELEASE_S = 0.5
"""Seconds for what multiprocessing does at its end: it may wait for a lock that the main thread holds."""

_received, _unwound, _leaving = threading.Event(), threading.Event(), threading.Lock()
_in_command = False


def _start_again() -> str:
    return "the same command starts it again"


_advice: Callable[[], str] = _start_again


def is_command_line() -> bool:
    """Whether this process is the command line, and not a test or a worker that imports it."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem in ("gpipe", "cli")


def install() -> None:
    """Handles interrupts from here on. Until ``command`` is entered one ends the process at once."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # written to even while the main thread runs no Python
    threading.Thread(target=_enforce, args=(signals,), daemon=True, name="interrupt").start()
    for number in SIGNALS:
        signal.signal(number, _on_signal)


def ignore() -> None:
    """Lets the process end by itself from here on: the command is done, and what libraries do at the end is short."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def received() -> bool:
    """Whether this process was interrupted: whatever fails from then on is no failure of its own."""
    return _received.is_set()


@contextmanager
def command() -> Iterator[None]:
    """A context that an interrupt leaves by KeyboardInterrupt."""
    global _in_command
    import psutil  # noqa: F401  # not in a signal handler

    _in_command = True
    try:
        yield
    finally:
        _in_command = False
        _unwound.set()


@contextmanager
def advised(text: Callable[[], str], afterwards: Callable[[], str] | None = None) -> Iterator[None]:
    """A context of the main thread whose interrupt ends with ``text``: how to go on. Behind its end the text is
    ``afterwards``, or again the one before."""
    global _advice
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _advice = _advice, text
    yield
    _advice = afterwards or before  # after an exception ``text`` is still to be said


def leave() -> NoReturn:
    """Says the sentence and ends this process, and before it all that it started."""
    with _leaving:  # for ever: whoever comes second has nothing to do
        with suppress(Exception):
            _say(_sentence())
        _mute()
        releasing = threading.Thread(target=_release_semaphores, daemon=True)
        with suppress(Exception):
            releasing.start()
            releasing.join(RELEASE_S)
        with suppress(Exception):
            _kill(lambda me: me.children(recursive=True))
        os._exit(EXIT_CODE)


def _sentence() -> str:
    try:
        return f"interrupted; {_advice()}"
    except Exception:  # of a disk, for instance
        return "interrupted; how to go on could not be found out"


def _on_signal(number: int, frame: object) -> None:
    if _received.is_set():
        return
    _received.set()
    sys.unraisablehook = lambda _: None
    threading.excepthook = lambda _: None
    if not _in_command:
        leave()
    with suppress(Exception):
        _kill_plain_workers()
    raise KeyboardInterrupt


def _enforce(signals: int) -> None:
    """Ends the process where it has not unwound in time."""
    while not set(os.read(signals, 64)) & set(SIGNALS):
        pass
    _received.set()
    if not _unwound.wait(JOB_STOP_S / 2 if JOB in os.environ else UNWIND_S):
        leave()


def _say(text: str) -> None:
    if os.isatty(2):
        text = f"\x1b[?25h\x1b[31m{text}\x1b[0m"  # a bar hides the cursor
    os.write(2, f"{text}\n".encode(errors="replace"))  # Python's own streams may be in the middle of a line


def _mute() -> None:
    """Nothing that libraries print at their end follows the sentence."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _release_semaphores() -> None:
    """Has multiprocessing unlink its semaphores: left to its tracker, that would print a warning."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._run_finalizers(0)


def _kill_plain_workers() -> None:
    """Kills the server that workers are forked from, and them: they are neither to report nor to print a failure that
    comes of the interrupt, such as a pipe of this process that is closed."""
    import psutil

    servers = [child for child in psutil.Process().children() if _runs(child, "multiprocessing.forkserver")]
    _kill(lambda _: [*servers, *(below for server in servers for below in server.children(recursive=True))])


def _kill(found: Callable[[psutil.Process], list[psutil.Process]]) -> None:
    """Kills the processes that ``found`` returns of this one, stopped first, for one that runs may start another. The
    tracker of semaphores ends by itself, with the last process that has one."""
    import psutil

    me, stopped = psutil.Process(), set[psutil.Process]()
    while new := {one for one in found(me) if not _runs(one, "multiprocessing.resource_tracker")} - stopped:
        for process in new:
            with suppress(psutil.Error):
                process.suspend()
        stopped |= new
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()


def _runs(process: psutil.Process, module: str) -> bool:
    import psutil

    with suppress(psutil.Error):
        return any(module in part for part in process.cmdline())
    return False
