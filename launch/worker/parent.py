"""Ends a process with the one that started it, so that none is left over."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
"""Linux's prctl option for the signal that a process gets when its parent dies."""


def end_with_parent() -> None:
    """Ends this process, which a forkserver has forked, when the process that asked for it or the forkserver ends, even
    if that was killed.

    Without the forkserver this process's end would not be noticed, and it would keep running next to its successor.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
