"""What an error of gloo or NCCL means: a wait timed out, a peer has ended, shared memory is too small.

    gloo    [gloo/transport/tcp/pair.cc:537] Connection closed by peer     says what happened
    NCCL    NCCL error in: NCCLUtils.hpp:268, unhandled system error       the same for every system call
            ncclSystemError: System call (e.g. socket, malloc) ...         the result; this one always names sockets
            Last error:
            Error while creating shared memory segment /dev/shm/nccl-1     what happened

Among NCCL's results only ncclRemoteError says that another process has ended. A lost store does too, in which the
processes meet when a communicator is made.
"""

from __future__ import annotations

import re
import shutil

from suite.errors import PeerLostError, PlacementError, StallError, first_line

_GLOO_LOST = "connection|broken pipe|socket|remote"
_NCCL_LOST = "ncclremoteerror|remote process exited|store->get.*(?:connection|broken pipe)"
_NCCL_RESULT = r"nccl\w+error|ncclinvalid\w+"
_NO_SHARED_MEMORY = r"creating shared memory segment(?!.*error: (?!no space left))"
"""Some versions of NCCL add the system's error. Only a full /dev/shm is one that more of it mends."""


def explain(error: Exception, what: str, seconds: float) -> Exception:
    """Returns what an error means for a worker that waited ``seconds`` for ``what``: a StallError if the wait timed out
    or the peer has ended, a PlacementError if NCCL had too little shared memory, and any other error unchanged."""
    text = str(error).lower()
    is_gloo = "gloo" in text
    if not is_gloo and "nccl" not in text:
        return error
    if re.search(_NO_SHARED_MEMORY, text):
        size_mib = shutil.disk_usage("/dev/shm").total >> 20
        return PlacementError(
            f"NCCL has too little shared memory ({_last_error(error)}): /dev/shm has {size_mib:,} MiB, and a "
            "container's default is 64; start it with docker run --shm-size 16g, or in Kubernetes mount an emptyDir of "
            "medium Memory at /dev/shm"
        )
    if re.search("timed out|timeout", text) and not re.search(_NCCL_RESULT, text):
        return StallError(f"waited {seconds:.0f} s for {what}")
    if re.search(_GLOO_LOST if is_gloo else _NCCL_LOST, text):
        return PeerLostError(f"lost the connection while waiting for {what}; that process has ended, see its log")
    return error


def summary(error: BaseException) -> str:
    """Returns the first line of an error's message, and what NCCL calls its last error, if there is one."""
    last = _last_error(error)
    return first_line(error) + (f"; last error: {last}" if last else "")


def _last_error(error: BaseException) -> str:
    match = re.search(r"Last error:\s*(\S.*)", str(error))
    return match[1].strip() if match else ""
