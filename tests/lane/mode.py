"""Tensors of the stand-in device are fake, those of the CPU are real; host waits and wrong devices are found.

On a GPU the host waits, for all work that it has queued, when it needs a value (``.item()``), when a shape depends on
values (a boolean mask), and at a copy in either direction that is not ``non_blocking``. A wait returns numbers that
stand for values, so that the program goes on, and is noted with its place.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.lane.standin import DEVICE

ROOT = Path(__file__).parents[2]
PRODUCT = ("suite", "launch", "models", "experiments", "examples", "tests")
aten = torch.ops.aten


class WrongDeviceError(AssertionError):
    """A tensor, or a generator, of another device than the stage's."""


class HostWaitError(AssertionError):
    """A wait of the host after which the program cannot go on without values."""


def place():
    """Returns the innermost place of the product, or of torch's optimizers, that is running: ``file:function``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if (
            (path.is_relative_to(ROOT / "tests/lane") and path.stem in ("mode", "standin"))
            or path == ROOT / "suite/device.py"
            or frame.f_code.co_name.startswith("<")
        ):
            pass
        elif path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            return f"{path.relative_to(ROOT)}:{frame.f_code.co_name}"
        elif path.parts[-3:-1] == ("torch", "optim") or "deepspeed" in path.parts:
            return f"{path.parts[-2]}/{path.name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


class StandinMode(TorchDispatchMode):
    """The mode in which a worker's code runs for ``standin:3``."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.status = None
        """The worker's status, which knows the action that runs."""
        self.waits = Counter()
        """By (place, what the host waited for, whether in an action)."""

    def __enter__(self):
        torch.standin.on_synchronize = lambda: self.wait("all work")
        # otherwise ``torch.tensor(..., device=...)`` copies below all modes
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._before)
        torch.standin.on_synchronize = lambda: None
        return super().__exit__(*error)

    def wait(self, what):
        """Notes a wait of the host."""
        in_action = self.status is not None and not isinstance(self.status.action, str)
        self.waits[place(), what, in_action] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.device.type == DEVICE.type]
        if not fakes and not any(isinstance(leaf, torch.device) and leaf.type == DEVICE.type for leaf in leaves):
            if func.namespace == "c10d" and func._opname in ("send", "recv_") and not only_integers(leaves):
                raise WrongDeviceError(f"{place()}: a message between stages is on the host")
            return func(*args, **kwargs)
        on_host = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]
        self._check_generator(leaves)
        packet = func._overloadpacket
        if packet is aten._local_scalar_dense:
            self.wait("a value")
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 0)
        if packet is aten.nonzero:
            self.wait("a shape")
            with self.fake:
                return torch.empty(args[0].shape[0], args[0].ndim, dtype=torch.int64, device=args[0].device)
        if packet is aten._to_copy and torch.device(kwargs.get("device") or args[0].device).type == "cpu":
            self.wait("a copy from the device")
            return stand_for(args[0], kwargs.get("dtype") or args[0].dtype)
        if packet is aten.copy_ and not isinstance(args[0], FakeTensor):
            self.wait("a copy from the device")
            return args[0].copy_(stand_for(args[1], args[0].dtype))
        if on_host and packet in (aten._to_copy, aten.copy_) and not is_async(func, args, kwargs):
            self.wait("a copy to the device")
        if packet in (aten.cat, aten.stack) and on_host:  # FakeTensorMode lets scalars of the host pass
            raise WrongDeviceError(f"{place()}: a tensor of the host among others")
        if packet in (aten.index, aten.index_put, aten.index_put_) and any(tensor.ndim for tensor in on_host):
            self.wait("an index on the host")
        try:
            with self.fake:
                args, kwargs = tree_map(without_values, (args, kwargs)) if on_host else (args, kwargs)
                out = func(*args, **kwargs)
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            raise HostWaitError(f"{place()}: a shape depends on values: {error.func}") from error
        except torch._subclasses.fake_tensor.DataDependentOutputException as error:
            raise HostWaitError(f"{place()}: the host needs a value: {error.func}") from error
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) and leaf.device not in (DEVICE, torch.device("meta")):
                raise WrongDeviceError(f"{place()}: {func} on {leaf.device}")
        return out

    def _check_generator(self, leaves):
        own = torch.standin.default_generators[DEVICE.index]
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and leaf is not own:
                raise WrongDeviceError(f"{place()}: a generator of another device")


def without_values(value):
    """Returns a CPU tensor as a fake one, which FakeTensorMode takes for no constant."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def only_integers(leaves):
    """Whether all tensors are of integers: only metadata, of shapes, is sent from the host."""
    return not any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)


def is_async(func, args, kwargs):
    """Whether a copy says ``non_blocking``."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False), **kwargs).get("non_blocking", False)


def stand_for(tensor, dtype):
    """Returns a CPU tensor in place of one without values: ones, or zeros for integers."""
    value = 1 if dtype.is_floating_point else 0
    return torch.full(tuple(tensor.shape), value, dtype=dtype)
