"""Declared devices: their published numbers, for plans of machines you do not have. And the devices of a plan.

Memory is what a process can use (``total_memory`` of ``torch.cuda.get_device_properties``, as reported; a run queries
its own). On GPUs that is less than the nominal size, because the driver reserves a part: about 79 GiB of 80 GB cards,
139 GiB of an H200, 15.75 GiB of 16 GB cards, 14.5 GiB of a T4. Rates are the makers' dense peaks of one accelerator, or
of one core of a TPU board, which the GPipe paper counts as an accelerator.

``efficiency`` is the share of a peak that large products reach in training: 0.5, about what Megatron-Core reports of
H100s (47%), in a range of 0.3 to 0.7 (ours). Large products of this machine are measured: layers reach 0.6 to 1 of that
(ours). Everything computed from these numbers is an estimate and is marked as one. So are the bytes that NCCL takes.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from suite.device import is_host, synchronize
from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.topology import MAX_CTAS, CellPair, TransportName
from suite.pipeline.planning.simulate import Link, Links
from suite.pipeline.runtime.gradient_reducer import ACCELERATOR_BUCKET_BYTES, BUCKET_BYTES

GIB, TERA, GIGA = 2**30, 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Memory in bytes, rates in operations and bytes a second."""

    name: str
    nominal_gb: int
    """The size in a card's name, such as A100-80GB; 0 where there is none."""
    memory_bytes: int
    fp32: float
    """The rate of matrix products of fp32 tensors, as frameworks run them by default: on a TPU with bf16 factors."""
    bf16: float
    """The rate of matrix products of bf16 tensors."""
    bandwidth: float
    """The rate at which the device reads and writes its own memory."""
    link: float
    """The rate to a neighbour in its node, in one direction."""
    link_name: str
    """The kind of the link, such as NVLink 4."""
    link_latency_s: float = 10e-6
    efficiency: float = 0.5
    efficiency_range: tuple[float, float] = (0.3, 0.7)
    """The lowest and highest share of a peak that products may reach. Our choice, not measured."""
    process_bytes: int = 0
    """Approximate bytes of a worker without a model: the libraries; on a GPU CUDA's context, kernels and workspaces."""
    is_cuda: bool = False
    """Whether autocast chooses the formats of CUDA devices."""
    launch_s: float = 0.0
    """Seconds in which the host starts one operator; the device waits for it where operators are small."""

    def product_rate(self, precision: str) -> float:
        """Returns the attainable operations a second of matrix products."""
        return self.efficiency * (self.bf16 if precision == "bf16" else self.fp32)

    @property
    def messages(self) -> Link:
        return Link(self.link_latency_s, self.link)


@dataclass(frozen=True)
class Machine:
    """The equal devices of a plan: their memory, what a worker takes of it, and the links between them."""

    memory_limit_bytes: int
    """The bytes of each device that a plan may use."""
    process_bytes: int = 0
    """The bytes of a worker without a model, with its communicators for collectives."""
    link: Link | Links = field(default_factory=Link)
    """The links between stages."""
    reduce_bytes_per_s: float = float("inf")
    """The rate at which replicas reduce gradients, and gather weights with ZeRO-1."""
    reduce_latency_s: float = 0.0
    """The latency of a message between replicas."""
    p2p_bytes: int = 0
    """The bytes of one point-to-point communicator (``p2p_communicators``)."""
    cores: int | None = None
    """How many workers compute at once, where several share a device; None: all."""
    reserve: int = 0
    """Bytes of each device beyond the limit, left free."""
    transport: TransportName = "gloo"
    """What carries the messages between stages."""

    def reduce_s_per_byte(self, replicas: int) -> float:
        """Returns the seconds in which replicas reduce a byte of gradients. A ring all-reduce sends every gradient
        twice, ZeRO-1 every gradient and every weight once; except each worker's own share. Each bucket waits for its
        messages."""
        bucket_bytes = BUCKET_BYTES if self.transport == "gloo" else ACCELERATOR_BUCKET_BYTES
        latency_s = self._messages(replicas) * self.reduce_latency_s
        return 2 * (replicas - 1) / replicas / self.reduce_bytes_per_s + latency_s / bucket_bytes

    def norm_all_reduce_s(self, workers: int) -> float:
        """Returns the seconds of a small all-reduce over all workers."""
        return self._messages(workers) * max(self.link.slowest.latency_s, self.reduce_latency_s)

    def _messages(self, workers: int) -> int:
        """Returns the messages of an all-reduce that follow one another: around a ring on gloo, in a tree on NCCL."""
        return 2 * (workers - 1 if self.transport == "gloo" else math.ceil(math.log2(workers)))


GPU_PROCESS_BYTES = 19 * GIB // 10
"""Bytes of a worker on a GPU without a model: CUDA's context, all kernels, which a run loads at its start, and the
workspaces of cuBLAS; 1.82 + 0.06 GiB measured on an H200."""

GPU_LAUNCH_S = 20e-6
"""Small layers took 19 to 33 us an operator, as the estimate counts them, on an H200 in a virtual machine, where the
smallest kernel took 8 (measured); a faster host needs less."""

_gpu = partial(Device, process_bytes=GPU_PROCESS_BYTES, is_cuda=True, launch_s=GPU_LAUNCH_S)
_TPU_V3 = Device("TPUv3", 16, 16 * GIB, 61.5 * TERA, 61.5 * TERA, 450 * GIGA, 82 * GIGA, "ICI")

# Without NVLink a message goes device, host, device: two passes over PCIe 3 at about 12 GB/s each, PCIe 4 at 24, PCIe 5
# at 48. P100, V100 and T4 have no bf16 products: they run at the fp32 rate. A B200 is a GPU of an HGX B200, a GB200 one
# of the 72 of a GB200 NVL72: the system's numbers divided by its GPUs. An MI250 is one of the two dies of its module,
# each of which ROCm shows as a GPU; fp32 of AMD is that of its matrix cores. Rates of RTX cards accumulate in fp32.
# Sources: Google Cloud's pages of TPUs; NVIDIA data sheets of P100, V100, T4, A10, A100, L4, L40, L40S, H100, H200, HGX
# B200, GB200 NVL72 and RTX 6000 Ada, its Ada and RTX Blackwell architecture papers; AMD's data sheets of MI250, MI250X
# and MI300X. Where a sheet gives a rate with sparsity, half of it.
DEVICES = {
    device.name: device
    for device in (
        Device("TPUv2", 8, 8 * GIB, 22.5 * TERA, 22.5 * TERA, 300 * GIGA, 62 * GIGA, "ICI"),
        _TPU_V3,
        _gpu("P100", 16, int(15.75 * GIB), 9.3 * TERA, 9.3 * TERA, 732 * GIGA, 6 * GIGA, "PCIe 3"),
        _gpu("V100", 16, int(15.75 * GIB), 15.7 * TERA, 15.7 * TERA, 900 * GIGA, 150 * GIGA, "NVLink 2"),
        _gpu("V100-32GB", 32, int(31.7 * GIB), 15.7 * TERA, 15.7 * TERA, 900 * GIGA, 150 * GIGA, "NVLink 2"),
        _gpu("T4", 16, int(14.5 * GIB), 8.1 * TERA, 8.1 * TERA, 320 * GIGA, 6 * GIGA, "PCIe 3"),
        _gpu("A10", 24, 22 * GIB, 31.2 * TERA, 125 * TERA, 600 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("A100", 80, 79 * GIB, 19.5 * TERA, 312 * TERA, 2039 * GIGA, 300 * GIGA, "NVLink 3"),
        _gpu("A100-40GB", 40, int(39.4 * GIB), 19.5 * TERA, 312 * TERA, 1555 * GIGA, 300 * GIGA, "NVLink 3"),
        _gpu("L4", 24, 22 * GIB, 30.3 * TERA, 121 * TERA, 300 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("L40", 48, int(44.4 * GIB), 90.5 * TERA, 181 * TERA, 864 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("L40S", 48, int(44.4 * GIB), 91.6 * TERA, 362 * TERA, 864 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("RTX 4090", 24, int(23.5 * GIB), 82.6 * TERA, 165.2 * TERA, 1008 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("RTX 5090", 32, int(31.3 * GIB), 104.8 * TERA, 209.5 * TERA, 1792 * GIGA, 24 * GIGA, "PCIe 5"),
        _gpu("RTX 6000 Ada", 48, int(47.4 * GIB), 91.1 * TERA, 364.2 * TERA, 960 * GIGA, 12 * GIGA, "PCIe 4"),
        _gpu("H100", 80, 79 * GIB, 67 * TERA, 989 * TERA, 3350 * GIGA, 450 * GIGA, "NVLink 4"),
        _gpu("H200", 141, 139 * GIB, 67 * TERA, 989 * TERA, 4800 * GIGA, 450 * GIGA, "NVLink 4"),
        _gpu("B200", 180, 178 * GIB, 75 * TERA, 2250 * TERA, 7700 * GIGA, 900 * GIGA, "NVLink 5"),
        _gpu("GB200", 186, 184 * GIB, 80 * TERA, 2500 * TERA, 8000 * GIGA, 900 * GIGA, "NVLink 5"),
        _gpu("MI250", 64, 64 * GIB, 45.3 * TERA, 181 * TERA, 1638 * GIGA, 50 * GIGA, "Infinity Fabric"),
        _gpu("MI250X", 64, 64 * GIB, 47.9 * TERA, 191.5 * TERA, 1638 * GIGA, 50 * GIGA, "Infinity Fabric"),
        _gpu("MI300X", 192, 191 * GIB, 163.4 * TERA, 1307.4 * TERA, 5300 * GIGA, 64 * GIGA, "Infinity Fabric"),
    )
}

THIS_DEVICE = "this"
"""The name of a device with the measured rates of this machine."""

ASSUMED_SPEED = " (speed of a TPUv3 core)"
"""Ends the name of a device of which only the memory is given."""

_SIZE = r"(\d{1,6}(?:\.\d{1,3})?)\s*(GiB|GB|G)"
_WORDS_OF_MAKERS = (
    "nvidia", "tesla", "geforce", "amd", "instinct", "google", "generation", "sxm", "sxm2", "sxm3", "sxm4", "sxm5",
)  # fmt: skip


def find_device(name: str, memory: int) -> Device:
    """Returns a declared device by its name, which may end with a memory size, such as A100-40GB or A100:60GiB;
    ``this``; or, for a size such as 16GiB alone, a TPUv3 core with that memory.

    A size in GB that the maker sells is that card, with what a process can use of it. ``memory`` is the bytes of each
    device of this machine. Raises SettingError, with all known devices, for anything else.
    """
    parts = re.fullmatch(rf"(?:(.+?)[\s:_-]*)??(?:{_SIZE})?", name, re.I | re.S | re.A)
    assert parts is not None, "everything matches"
    card, amount, unit = parts[1] or "", float(parts[2] or 0), (parts[3] or "").upper()
    size = int(amount * (10**9 if unit == "GB" else GIB))
    if unit and not card and size:
        return replace(_TPU_V3, name=f"{parts[2]}{parts[3]}{ASSUMED_SPEED}", memory_bytes=size)
    if card.lower() == THIS_DEVICE and not unit:
        return this_device(memory)
    sold = [device for device in DEVICES.values() if _key(device.name.partition("-")[0]) == _key(card)]
    if not sold or (unit and not size):
        raise SettingError(f"no device is called {name!r}; {known_devices()}")
    if not unit:
        return sold[0]
    for device in sold:
        if unit != "GIB" and amount == device.nominal_gb:
            return device
    larger = [device for device in sold if device.nominal_gb * GIB >= size] or sold
    closest = min(larger, key=lambda device: device.memory_bytes)
    return replace(closest, name=f"{sold[0].name}:{parts[2]}{parts[3]}", memory_bytes=size)


def known_devices() -> str:
    """Returns what ``find_device`` takes."""
    return f"devices are {', '.join(DEVICES)}, {THIS_DEVICE}, one with a memory, such as A100:60GiB, or a size alone"


def _key(name: str) -> str:
    """Returns what is compared of a card's name: no case, no separators, no words of its maker."""
    words = re.split(r"[\s:_-]+", name.lower())
    return "".join(word for word in words if word not in _WORDS_OF_MAKERS)


CPU_PROCESS_BYTES = 2 * GIB // 5
"""Bytes of a worker on CPU cores without a model: the libraries and the open data; 0.34 GiB measured."""

RATE_S = 0.2
"""Seconds in which each of this machine's rates is measured."""


def this_device(memory: int) -> Device:
    """Returns this machine as a device: the rates of a large product and a large copy, measured in about a second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / _fastest_s(lambda: target.copy_(source), device, RATE_S)
    # measured rates need no discount, and a message between two processes of one machine is a copy or two
    return Device(
        name=f"this machine ({device.type})",
        nominal_gb=0,
        memory_bytes=memory,
        fp32=measured_product_rate(device, torch.float32, RATE_S),
        bf16=measured_product_rate(device, torch.bfloat16, RATE_S),
        bandwidth=copied,
        link=copied / 2,
        link_name="a copy",
        link_latency_s=100e-6,
        efficiency=1.0,
        efficiency_range=(0.6, 1.0),
        process_bytes=CPU_PROCESS_BYTES if is_host(device) else GPU_PROCESS_BYTES,
        is_cuda=device.type == "cuda",
        launch_s=0.0 if is_host(device) else GPU_LAUNCH_S,
    )


def measured_product_rate(device: torch.device, dtype: torch.dtype, least_s: float) -> float:
    """Returns the operations a second of a large matrix product, repeated for ``least_s`` seconds."""
    on_host = 1024 if dtype == torch.float32 else 512  # a core without bf16 products takes two seconds for 1024
    side = on_host if is_host(device) else 4096
    generator = torch.Generator(device).manual_seed(0)  # a data set may draw from the default one
    # products of ones draw less power and so run faster
    matrix = torch.randn(side, side, device=device, generator=generator).to(dtype)
    return 2.0 * side**3 / _fastest_s(lambda: matrix @ matrix, device, least_s)


def _fastest_s(work: Callable[[], object], device: torch.device, least_s: float) -> float:
    """Returns the fewest seconds that ``work`` takes: other work on the machine only slows it down."""
    work()  # allocates, and starts the threads
    fastest_s, begin = math.inf, time.perf_counter()
    while math.isinf(fastest_s) or time.perf_counter() - begin < least_s:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - start)
    return fastest_s


P2P_CHANNEL_BYTES = 20 << 20
"""Bytes that NCCL takes beside torch's allocator when a communicator is first used; a cost measurement has none yet.
Its log on H100s shows buffers of 10 MiB and 2 MiB a channel and peer (github.com/NVIDIA/nccl/issues/1685). A
communicator also shares 8 MiB a channel among its peers on the network: 512 MiB for 64 channels (issue 2363)."""

P2P_BYTES = MAX_CTAS * P2P_CHANNEL_BYTES
"""Bytes of a point-to-point communicator: each thread block has a channel."""

COLLECTIVE_BYTES = 688 * 10**6
"""Bytes of a communicator for collectives, which has all channels: reported for 3 and 4 A100s with NVLink, and 544 MB
for two (github.com/NVIDIA/nccl/issues/964). We assume it for other GPUs and for any number of nodes."""


def p2p_communicators(pairs: Sequence[CellPair], placement: CellPlacement) -> list[int]:
    """Returns how many point-to-point communicators each stage has: for each of its pairs of cells one for activations
    and one for gradients."""
    ends = Counter(placement.stage_of(cell) for pair in pairs for cell in pair)
    return [2 * ends[stage] for stage in range(placement.stages)]


def collective_bytes(stages: int, replicas: int, tied: int) -> int:
    """Returns the bytes of a worker's communicators for collectives: of all workers, of the replicas of its stage, and
    of the stages that hold each of the ``tied`` parameters."""
    groups = (stages * replicas > 1) + (replicas > 1) + (tied if stages > 1 else 0)
    return groups * COLLECTIVE_BYTES
