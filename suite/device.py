"""What a kind of device needs. The CPU is the host itself; any other device works while the host runs ahead of it.

    cpu                  the host computes, so a result is there when the call returns
    cuda, or another     torch's module of that name, such as ``torch.cuda``, has what is needed: ``synchronize``,
                         ``Event``, ``default_generators``, ``memory_allocated``, ...

Code that depends on the device asks here or that module, never for CUDA by name. So all devices that are not the CPU
take the same branches.
"""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from suite.errors import PlacementError

Result = TypeVar("Result")

MULTIPLIES_BF16_INTO_FP32 = ("cuda", "xpu")
"""Kinds of devices where ``torch.mm`` and ``torch.addmm`` have ``out_dtype`` (torch 2.13). The CPU has no such product:
fp32 factors take four times as long, and blocks that stay in the cache save nothing at 512 tokens and more."""

COMPILES = ("cuda",)
"""Kinds of devices for which torch's compiler makes kernels (Triton, by a C compiler with Python's headers)."""


_OPTIONS: dict[str, Any] = {"deterministic": True, "emulate_precision_casts": True, "triton.mix_order_reduction": False}
"""Options of the compiler. Kernels are chosen without measuring, which may choose others in another process; each
operation rounds as it does alone; and no kernel asks for a least number of rows."""

_USUAL_ROWS = 4096
"""The number of rows for which kernels are chosen. Otherwise the first call would choose them, and a resumed run may
begin with another number of rows."""

_MOST_VALUES = 2**31 - 1
"""Kernels index rows by 32-bit integers."""

Run = Callable[..., Any]

_runs_fused: ContextVar[Run | None] = ContextVar("_runs_fused", default=None)


@contextmanager
def fused_by(run: Run) -> Iterator[None]:
    """A context in which ``run(function, *args, **constants)`` calls each fused function, on any device: to count what
    a device would do that compiles it."""
    token = _runs_fused.set(run)
    try:
        yield
    finally:
        _runs_fused.reset(token)


def unfused() -> AbstractContextManager[None]:
    """A context in which fused functions run as they are."""
    return fused_by(lambda function, *args, **constants: function(*args, **constants))


def is_fused(rows: Tensor) -> bool:
    """Whether fused functions of these rows are compiled. Those of tensors that infer shapes, fake or meta, are not."""
    compiles = _runs_fused.get() is not None or (rows.device.type in COMPILES and type(rows) is Tensor)
    return compiles and not rows.is_meta


def fused(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns a function of rows (N, ...) with its elementwise operations and sums fused into few kernels, on devices
    for which torch's compiler makes some; elsewhere, and where a dimension of the rows is 0 or 1, it runs as it is.
    Positional tensors have N rows or are scalars; keyword arguments, such as weights, have fixed shapes. What a
    compiled function returns has no graph.

    It is compiled once for each type and width, and any number of rows. In training that happens while a stage warms
    up: kernels that are loaded later may wait for a message that waits for them (``launch.worker.gpu_environment``).
    """
    compiled: dict[tuple[Any, ...], Callable[..., Result]] = {}

    @wraps(function)
    def call(rows: Tensor, *args: Any, **constants: Any) -> Result:
        if not is_fused(rows) or min(rows.shape) < 2 or rows.numel() > _MOST_VALUES:
            return function(rows, *args, **constants)
        given = [_without_graph(arg) for arg in (rows, *args)]
        fixed = {name: _without_graph(arg) for name, arg in constants.items()}
        if (run := _runs_fused.get()) is not None:
            with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
                return cast(Result, run(function, *given, **fixed))
        kinds = *(_kind(arg, 1) for arg in given), *(_kind(arg, 0) for arg in fixed.values())
        if kinds not in compiled:
            compiled[kinds] = _compile(function, given, fixed)
        return compiled[kinds](*given, **fixed)

    return call


def _without_graph(arg: Any) -> Any:
    return arg.detach() if isinstance(arg, Tensor) else arg  # two arguments that were one object would stay one


def _kind(arg: Any, begin: int) -> Any:
    """Returns what kernels depend on: of a tensor type, device, strides, and its shape from a dimension on."""
    return (arg.dtype, arg.device, arg.stride(), arg.shape[begin:]) if isinstance(arg, Tensor) else arg


def _compile(function: Callable[..., Result], given: list[Any], fixed: dict[str, Any]) -> Callable[..., Result]:
    """Returns the function compiled for any number of rows, without torch's checks of each call, which take as long as
    the kernels of small rows. Raises PlacementError."""
    host = socket.gethostname()
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(map(shutil.which, compilers)) or not headers.exists():
        raise PlacementError(
            f"{host} lacks a C compiler or {headers}, with which torch makes kernels; install gcc and python3-dev"
        )
    for arg in given:
        if isinstance(arg, Tensor) and arg.ndim:
            torch._dynamo.mark_dynamic(arg, 0, hint_override=_USUAL_ROWS)
    try:
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            graph: Any = torch.compile(function, fullgraph=True, dynamic=False, options=_OPTIONS)
            found = graph.aot_compile((tuple(given), fixed))
    except RuntimeError as error:
        said = " ".join(str(error).split("\n\n")[0].split())
        raise PlacementError(
            f"torch's compiler failed on {host} in {function.__name__}: {said}; mend gcc and Triton there, which `make "
            "gpu-check` tries"
        ) from error
    found.disable_guard_check()
    return cast(Callable[..., Result], found)


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which the host's operations have one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_host(device: torch.device) -> bool:
    """Whether the host computes itself. On any other device it starts operations and runs ahead of them."""
    return device.type == "cpu"


def module_of(device: torch.device) -> Any:
    """Returns torch's module for this kind of device, such as ``torch.cuda``; for devices that are not the host."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished all work."""
    if not is_host(device):
        module_of(device).synchronize(device)


def generator_of(device: torch.device) -> torch.Generator:
    """Returns the generator from which operations on the device draw by default."""
    return torch.default_generator if is_host(device) else module_of(device).default_generators[device.index or 0]


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """A context that restores torch's generators at its end: the host's and the device's."""
    return torch.random.fork_rng([] if is_host(device) else [device], device_type=device.type)
