"""Declared devices: their published numbers, for plans of machines you do not have.

Memory is what a process can use: on GPUs less than the nominal size, because the driver reserves a part;
about 79 GiB of 80 GB cards, 139 GiB of an H200 and 15.75 GiB of 16 GB cards (``total_memory`` of
``torch.cuda.get_device_properties``, as reported; a run queries its own). Rates are the makers' dense peaks
of one accelerator, or of one core of a TPU board, which the GPipe paper counts as an accelerator. ``efficiency`` is the
share of a peak that large products reach in training: 0.5, about what Megatron-Core reports of H100s (47%), in a range
of 0.3 to 0.7 (ours). Of this machine large products are measured: layers reach 0.6 to 1 of that (ours). Everything
computed from these numbers is an estimate and is marked as one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from suite.device import is_host, synchronize
from suite.errors import SettingError, nearest
from suite.pipeline.model.topology import TransportName
from suite.pipeline.planning.simulate import Link, Links

GIB = 2**30
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Memory in bytes, rates in operations and bytes a second."""

    name: str
    memory_bytes: int
    fp32: float
    """Matrix products of fp32 tensors, as frameworks run them by default: on a TPU with bf16 factors."""
    bf16: float
    bandwidth: float
    """Of its own memory."""
    link: float
    """To a neighbour in its node, one direction, of the kind ``link_name``."""
    link_name: str
    link_latency_s: float = 10e-6
    efficiency: float = 0.5
    efficiency_range: tuple[float, float] = (0.3, 0.7)
    """The lowest and highest share of a peak that products may reach. Our choice, not measured."""
    process_bytes: int = 0
    """Approximate bytes of a worker without a model: the libraries; on a GPU CUDA's context and kernels."""
    is_cuda: bool = False
    """Whether autocast chooses the formats of CUDA devices."""

    def product_rate(self, precision: str) -> float:
        """Returns the attainable operations a second of matrix products."""
        return self.efficiency * (self.bf16 if precision == "bf16" else self.fp32)

    @property
    def messages(self) -> Link:
        """The link to the neighbouring stage."""
        return Link(self.link_latency_s, self.link)


@dataclass(frozen=True)
class Machine:
    """The devices of a plan: bytes of each, bytes of a worker process, and the links between them."""

    memory_limit_bytes: int
    """The bytes of each device that a plan may use."""
    process_bytes: int = 0
    """Of a worker without a model, with its communicators for collectives."""
    link: Link | Links = field(default_factory=Link)
    reduce_bytes_per_s: float = float("inf")
    """Of the reduction of gradients over replicas, and of ZeRO-1's gather of weights."""
    p2p_bytes: int = 0
    """Of each point-to-point communicator (``suite.pipeline.planning.communicators``)."""
    cores: int | None = None
    """How many workers compute at once, where several share a device; None: all."""
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""
    transport: TransportName = "gloo"
    """Of the messages between stages."""


_gpu = partial(Device, process_bytes=GIB, is_cuda=True)
_TPU_V3 = Device("TPUv3", 16 * GIB, 61.5 * TERA, 61.5 * TERA, 450 * GIGA, 82 * GIGA, "ICI")

DEVICES = {
    device.name: device
    for device in (
        Device("TPUv2", 8 * GIB, 22.5 * TERA, 22.5 * TERA, 300 * GIGA, 62 * GIGA, "ICI"),
        _TPU_V3,
        # without NVLink a message goes device, host, device: two passes over PCIe 3 at about 12 GB/s each
        # neither of these two has bf16 products: they run at the fp32 rate
        _gpu("P100", int(15.75 * GIB), 9.3 * TERA, 9.3 * TERA, 732 * GIGA, 6 * GIGA, "PCIe 3"),
        _gpu("V100", int(15.75 * GIB), 15.7 * TERA, 15.7 * TERA, 900 * GIGA, 150 * GIGA, "NVLink 2"),
        _gpu("A100", 79 * GIB, 19.5 * TERA, 312 * TERA, 2039 * GIGA, 300 * GIGA, "NVLink 3"),
        _gpu("H100", 79 * GIB, 67 * TERA, 989 * TERA, 3350 * GIGA, 450 * GIGA, "NVLink 4"),
        _gpu("H200", 139 * GIB, 67 * TERA, 989 * TERA, 4800 * GIGA, 450 * GIGA, "NVLink 4"),
    )
}

THIS_DEVICE = "this"
"""The name of a device with the measured rates of this machine."""


def find_device(name: str, memory: int) -> Device:
    """Returns a declared device by name; ``this``; or, for a size such as 16GiB, a TPUv3 core with that memory.

    A size alone does not give a speed, so that of the paper's 16 GB accelerator is used. ``memory`` is the bytes of
    each device of this machine. Raises SettingError for anything else.
    """
    if size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|G)", name, re.IGNORECASE):
        unit = 10**9 if size[2].upper() == "GB" else GIB
        if float(size[1]) > 0:
            return replace(
                _TPU_V3, name=f"{size[1]}{size[2]} (speed of a TPUv3 core)", memory_bytes=int(float(size[1]) * unit)
            )
    known = {device.lower(): device for device in (*DEVICES, THIS_DEVICE)}
    if name.lower() not in known:
        raise SettingError(
            f"no device is called {name!r}; {nearest(name, known.values())} or give its memory, such as 16GiB"
        )
    chosen = known[name.lower()]
    return this_device(memory) if chosen == THIS_DEVICE else DEVICES[chosen]


CPU_PROCESS_BYTES = 2 * GIB // 5
"""Bytes of a worker on CPU cores without a model: the libraries and the open data; 0.34 GiB measured."""


def this_device(memory: int) -> Device:
    """Returns this machine as a device: the rates of a large product and a large copy, measured in about a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    side = 768 if is_host(device) else 4096
    fp32, bf16 = (_rate(side, dtype, device) for dtype in (torch.float32, torch.bfloat16))
    source = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _seconds(lambda: target.copy_(source), device)
    # measured rates need no discount, and a message between two processes of one machine is a copy or two
    return Device(
        f"this machine ({device.type})",
        memory,
        fp32,
        bf16,
        copied,
        copied / 2,
        "a copy",
        100e-6,
        efficiency=1.0,
        efficiency_range=(0.6, 1.0),
        process_bytes=CPU_PROCESS_BYTES if is_host(device) else GIB,
        is_cuda=device.type == "cuda",
    )


def _rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.randn(side, side, device=device).to(dtype)  # products of ones draw less power and so run faster
    return 2.0 * side**3 / _seconds(lambda: matrix @ matrix, device)


def _seconds(work: object, device: torch.device, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        work()  # type: ignore[operator]
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times)[rounds // 2]
