"""What texts of gloo, NCCL and torch's process groups mean. Those of NCCL are as its users report them."""

from types import SimpleNamespace

import pytest

from suite.errors import PeerLostError, PlacementError, StallError
from suite.pipeline.runtime.communication_errors import explain, summary


def nccl(detail, result, last=""):
    text = f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {detail}, NCCL version 2.27.5\n"
    return text + result + (f"\nLast error:\n{last}" if last else "")


def system_error(last):
    return nccl(
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
        last,
    )


def remote_error(last):
    return nccl(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        last,
    )


LOST = [
    remote_error("socketProgressOpt: Call to recv from 10.1.2.3<33759> failed : Connection reset by peer"),
    remote_error("NET/IB : Got completion from peer 10.1.2.3<39138> with error 12, opcode 0, len 0, vendor err 129"),
    "NCCL error: remote process exited or there was a network error, NCCL version 2.14.3",
    "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: Connection reset by peer",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.1.2.3]:12345",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] writev [10.1.2.3]:12345: Broken pipe",
]

LATE = [
    "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=9, "
    "Timeout(ms)=300000) ran for 300021 milliseconds before timing out.",
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
    "store->get('0') got error: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation",
]

FULL = [
    system_error("Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384)"),
    system_error("Error while creating shared memory segment nccl-shm-recv-250a7cc850ba9298-0-1-3 (size 9637888)"),
]

UNCHANGED = [
    system_error("socketStartConnect: Connect to 10.1.2.3<45763> failed : Software caused connection abort"),
    system_error(
        "Error while creating shared memory segment /dev/shm/nccl-Ab12Cd (size 7340384), error: Permission denied (13)"
    ),
    system_error(
        "Error while attaching to shared memory segment /dev/shm/nccl-glnlGK (size 14156128), error: No such "
        "file or directory (2)"
    ),
    system_error(""),
    nccl(
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Failed to CUDA calloc async 608 bytes",
    ),
    "mat1 and mat2 shapes cannot be multiplied (remote connection socket timeout)",
]


@pytest.mark.parametrize("text", LOST)
def test_a_neighbour_that_has_ended(text):
    assert type(explain(RuntimeError(text), "a tensor", 5.0)) is PeerLostError


@pytest.mark.parametrize("text", LATE)
def test_a_wait_that_timed_out(text):
    found = explain(RuntimeError(text), "a tensor", 5.0)
    assert type(found) is StallError
    assert str(found) == "waited 5 s for a tensor"


@pytest.mark.parametrize("text", FULL)
def test_shared_memory_that_is_too_small(text, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: {"/dev/shm": SimpleNamespace(total=64 << 20)}[path])
    found = explain(RuntimeError(text), "a tensor", 5.0)
    assert type(found) is PlacementError
    segment = text.splitlines()[-1]
    assert str(found) == (
        f"NCCL has too little shared memory ({segment}): /dev/shm has 64 MiB, and a container's default is 64; start "
        "it with docker run --shm-size 16g, or in Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    )


@pytest.mark.parametrize("text", UNCHANGED)
def test_any_other_error_keeps_its_own_text(text):
    error = RuntimeError(text)
    assert explain(error, "a tensor", 5.0) is error


def test_a_summary_has_the_last_error_of_nccl_and_no_stack():
    text = system_error("Call to connect returned Connection refused") + "\nException raised from create at ..."
    assert summary(RuntimeError(text)) == (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5; last error: Call to connect returned Connection refused"
    )
    assert summary(ValueError("bad\nlines")) == "bad"
    assert summary(ValueError()) == "ValueError"
