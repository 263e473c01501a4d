"""Ends a process with the one that started it, so that none is left over."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import threading

from launch import interrupts


def end_with_parent() -> None:
    """Ends this process, which a forkserver has forked, when the process that asked for it or the forkserver ends, even
    if that was killed.

    Without the forkserver this process's end would not be noticed, and it would keep running next to its successor.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: sent when the parent dies
    mp.set_start_method(None, force=True)  # the forkserver is not the choice of the user's code


def ignore_sigterm() -> None:
    """Leaves a scheduler's SIGTERM to all processes to the command, which lets its workers save first. Processes that
    this one starts get it as usual."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    interrupts.default_in_forks()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _wait_for_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os.register_at_fork(before=threading.Event().wait)  # a thread of a pool would replace the process killed here
        interrupts.kill()
        os._exit(1)
