"""One worker of K x R alone: a process group that sends and receives nothing, and DeepSpeed for the stand-in."""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.lane.mode import WrongDeviceError, place
from tests.lane.standin import COUNT, DEVICE


def _make_group(options, backend_options):
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size, backend_options)


dist.Backend.register_backend("lane", _make_group, extended_api=True, devices=["cpu", "standin"])


@contextmanager
def worker(rank, world):
    """A context in which this process is one of ``world`` workers. A receive leaves its tensor as it is."""
    dist.init_process_group("lane", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Stream:
    """A stream whose work is done at once."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class StandinAccelerator(CPU_Accelerator):
    """DeepSpeed's view of the stand-in: it knows devices by their index alone."""

    def __init__(self):
        super().__init__()
        self._name, self._index = DEVICE.type, 0

    def device_name(self, device_index=None):
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index=None):
        return torch.device(self._name, device_index or 0)

    def set_device(self, device_index):
        self._index = device_index

    def current_device(self):
        return self._index

    def current_device_name(self):
        return f"{self._name}:{self._index}"

    def device_count(self):
        return COUNT

    def is_synchronized_device(self):
        return False

    def Stream(self, *args, **kwargs):  # noqa: N802
        return Stream()

    def current_stream(self, device_index=None):
        return Stream()

    default_stream = current_stream

    def stream(self, stream):
        return nullcontext()

    def on_accelerator(self, tensor):
        return tensor.device.type == self._name

    def communication_backend_name(self):
        return "lane"


set_accelerator(StandinAccelerator())


def _stay(module, device):
    """In place of ``Module.to``, which cannot move fake parameters: DeepSpeed moves a stage to its own device."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != torch.device(device):
            raise WrongDeviceError(f"{place()}: {name} is moved from {tensor.device} to {device}")
    return module


_to = nn.Module.to
nn.Module.to = lambda module, *args: (
    _stay(module, *args) if any(isinstance(p, FakeTensor) for p in module.parameters()) else _to(module, *args)
)
