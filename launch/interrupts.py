"""Handles SIGINT and SIGTERM: a command prints one sentence, exits with code 130 or 143, and leaves no process behind.

SIGINT or SIGTERM --> main thread        kills plain worker processes; KeyboardInterrupt unwinds the command
                  \\-> thread "interrupt"  ends the process if the main thread has not unwound after UNWIND_S: a library
                                         may block it, or swallow the KeyboardInterrupt

The first SIGTERM of a scheduler to a run that trains only asks it to save and to end (``first_sigterm``). After an
interrupt, later signals have no effect. At the end of an interrupted command all its descendants are killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""A terminal and ``make`` send SIGINT, a scheduler sends SIGTERM."""

UNWIND_S = 2.5
"""Seconds from the signal, or from the end of the command, to the forced exit."""

JOB, JOB_STOP_S = "GPIPE_JOB", 60
"""Environment variable of a submitted job, its name; seconds between the signal that asks its driver to stop and the
one that kills it. The driver has half of them to stop its workers."""

_received, _unwound, _leaving = threading.Event(), threading.Event(), threading.Lock()
_in_command = _is_handled = False
_number = signal.SIGINT

_asks: Callable[[], bool] | None = None
"""What the first SIGTERM does instead of an interrupt; returns whether it did."""
_has_asked, _decided = False, threading.Event()
"""What it returned, once it is known."""

_advice: Callable[[], str] | None = None
"""Says how to continue; None: by the same command."""


def is_command_line() -> bool:
    """Whether this process is the command line, not a test or a worker that imports it."""
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").stem in ("gpipe", "cli")


def install() -> None:
    """Installs the signal handlers. Until ``interruptible`` is entered, an interrupt ends the process immediately."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # receives signals even while the main thread runs no Python
    threading.Thread(target=_enforce, args=(signals,), daemon=True, name="interrupt").start()
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    default_in_forks()


def default_in_forks() -> None:
    """Gives processes that this one forks, such as those of a user's pool, Python's own handlers: they are to end by
    their signals, also by one that arrives at once."""
    os.register_at_fork(before=_block, after_in_parent=_restore_mask, after_in_child=_restore_own)


_masks = threading.local()
"""The signals that a thread blocked before it forked."""


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _restore_mask() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _restore_own() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_mask()


def ignore() -> None:
    """Ignores further interrupts of the command line: it is done, and the libraries' exit handlers are short."""
    if is_command_line():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def leave(code: int) -> NoReturn:
    """Exits, even if a thread or process of the user's own, for which Python waits, does not end."""
    ignore()
    if is_command_line():
        late = threading.Timer(UNWIND_S, lambda: (kill(), os._exit(code)))  # type: ignore[func-returns-value]
        late.daemon = True
        late.start()
    sys.exit(code)


def was_interrupted() -> bool:
    """Whether this process was interrupted. Errors after that are consequences of the interrupt, not failures."""
    return _received.is_set()


def exit_code() -> int:
    """Returns the exit code of an interrupted command, by the shell's rule: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + _number


def interrupted() -> KeyboardInterrupt:
    """Marks this process as interrupted, and returns what to raise: it has done what ``first_sigterm`` asked for."""
    global _number
    _number = signal.SIGTERM if not _received.is_set() else _number
    _received.set()
    return KeyboardInterrupt()


@contextmanager
def first_sigterm(event: threading.Event, when: Callable[[], bool]) -> Iterator[None]:
    """A context of the main thread, in which the first SIGTERM sets ``event`` instead of interrupting, if ``when()``
    holds. The next one interrupts."""
    global _asks

    def ask() -> bool:
        global _asks
        if has_asked := when():
            _asks = None
            event.set()
        return has_asked

    _asks = ask if threading.current_thread() is threading.main_thread() else None
    try:
        yield
    finally:
        _asks = None


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which an interrupt raises KeyboardInterrupt."""
    global _in_command
    _in_command = True
    try:
        yield
    finally:
        _in_command = False
        _unwound.set()


@contextmanager
def interrupt_message(text: Callable[[], str], afterwards: Callable[[], str] | None = None) -> Iterator[None]:
    """A context of the main thread. An interrupt in it prints ``text``, which says how to continue. After the context
    the text is ``afterwards``, or by default the previous one."""
    global _advice
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _advice = _advice, text
    yield
    _advice = afterwards or before  # not in a ``finally``: after an exception ``text`` still has to be printed


def kill_children_and_exit() -> NoReturn:
    """Prints the message, kills all descendants of this process, and exits."""
    with _leaving:  # never released: a second caller blocks until the exit
        with suppress(Exception):
            _print_message()
        null = os.open(os.devnull, os.O_WRONLY)  # for what libraries print while they exit
        os.dup2(null, 1)
        os.dup2(null, 2)
        with suppress(Exception):
            kill()
        os._exit(exit_code())


def _print_message() -> None:
    try:
        text = f"interrupted; {_advice() if _advice else 'run the same command again to restart'}"
    except Exception:  # such as a disk error
        text = "interrupted; the state of the run could not be read"
    if os.isatty(2):
        text = f"\x1b[?25h\x1b[31m{text}\x1b[0m"  # shows the cursor that a progress bar hid
    os.write(2, f"{text}\n".encode(errors="replace"))  # Python's own streams may be in the middle of a line


def _on_signal(number: int, frame: object) -> None:
    global _is_handled, _has_asked, _number
    try:
        _has_asked = number == signal.SIGTERM and _asks is not None and _asks()
    finally:
        _decided.set()
    if _has_asked or _is_handled:  # not ``_received``: the thread may have set it before
        return
    _number = signal.Signals(number)
    _is_handled = True
    _received.set()
    sys.unraisablehook = lambda _: None
    threading.excepthook = lambda _: None
    if not _in_command:
        kill_children_and_exit()
    with suppress(Exception):  # also the forkserver, which would report a closed pipe as a failure
        kill(lambda _: [process for server in _servers() for process in (server, *_below(server))])
    raise KeyboardInterrupt


def _enforce(signals: int) -> None:
    """Ends the process if it has not unwound in time."""
    global _number
    while not (numbers := set(os.read(signals, 64)) & set(SIGNALS)) or _has_only_asked(numbers):
        pass
    _number = signal.SIGTERM if signal.SIGTERM in numbers else signal.SIGINT
    _received.set()
    if not _unwound.wait(JOB_STOP_S / 2 if JOB in os.environ else UNWIND_S):
        kill_children_and_exit()


def _has_only_asked(numbers: Collection[int]) -> bool:
    """Whether the main thread takes signals as the first SIGTERM of ``first_sigterm``; waits until it has decided."""
    has_decided = {*numbers} == {signal.SIGTERM} and (_asks is not None or _has_asked) and _decided.wait(UNWIND_S)
    _decided.clear()
    return has_decided and _has_asked


def workers() -> list[psutil.Process]:
    """Returns the children of this process's forkserver, also those that it adopted from a dead worker."""
    return [child for server in _servers() for child in _below(server, recursive=False)]


def kill_workers(spared: Collection[int | None] = ()) -> None:
    """Kills all ``workers`` but the ``spared``, by pid, and all that they have started. wandb's writer ends by itself,
    once it has written all."""
    own = [worker for worker in workers() if worker.pid not in spared]
    kill(lambda _: [p for worker in own for p in (worker, *_below(worker)) if not _runs(p, "wandb-core")])


def _servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if _runs(child, "multiprocessing.forkserver")]


def _below(process: psutil.Process, recursive: bool = True) -> list[psutil.Process]:
    with suppress(psutil.Error):  # it has ended
        return list(process.children(recursive=recursive))
    return []


def kill(find: Callable[[psutil.Process], list[psutil.Process]] = lambda this: this.children(recursive=True)) -> None:
    """Kills the processes that ``find`` returns for this process, by default all below it. It suspends them first,
    because a running process may start another. The resource tracker is spared: it ends with its last user."""
    this, stopped = psutil.Process(), set[psutil.Process]()
    while new := {child for child in find(this) if not _runs(child, "multiprocessing.resource_tracker")} - stopped:
        for process in new:
            with suppress(psutil.Error):
                process.suspend()
        stopped |= new
    for process in stopped:
        with suppress(psutil.Error):
            process.kill()


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.Error):
        return any(module in part for part in process.cmdline())
    return False
