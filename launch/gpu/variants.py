"""Other ways to compute the same cell, all in one run and in turn, so that a clock that drifts drifts for all of them.

A way that cannot run says why in one line. What is timed is forward, rebuild and backward of a mini-batch of equal
rows; updates are the same for all. A way pays where its median, a token, is below the plain one's fastest round, and
its rebuilds are its forwards to the bit: else a stage would send on other activations than it differentiates.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from launch.gpu.lone import Lone, forget, seconds
from launch.gpu.work import Sizes, Work
from models import attention
from suite.pipeline.allocation import Allocation
from suite.pipeline.microbatch import MiniBatch

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

WARM_UPS = 2

LONGEST_REASON = 300

Build = Literal["eager", "compiled", "bf16 weights"]


@dataclass(frozen=True)
class Variant:
    """One way: how the layers are made, who computes attention, with the model's mask or without, rows a micro-batch.

    Attention of torch's choice where ``backend`` is None. ``bound`` marks what is no way to train: it says how much
    there is to gain.
    """

    name: str
    rows: int
    build: Build = "eager"
    backend: str | None = None
    masked: bool = True
    bound: bool = False


@dataclass(frozen=True)
class Timed:
    """What came of a variant: seconds of each round; or, where it cannot run, ``failure`` says why."""

    variant: Variant
    work: Work
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    """Over weights and gradients, which stand already."""
    same: bool | None = None
    """Whether a rebuild has the bits of the forward."""
    attention: str | None = None
    """The operators that computed attention; None where they cannot be seen."""
    failure: str | None = None

    @property
    def median_s(self) -> float | None:
        """Of all rounds."""
        return statistics.median(self.seconds) if self.seconds else None

    def pays(self, plain: Timed) -> bool | None:
        """Whether it is faster than every round of the plain one; None for what is no way to train, or is the plain."""
        if self.variant.bound or self is plain:
            return None
        if self.median_s is None or not plain.seconds or not self.same:
            return False
        return self.median_s / self.work.tokens < min(plain.seconds) / plain.work.tokens


def variants(sizes: Sizes) -> list[Variant]:
    """Returns all ways, the plain one first."""
    plain = Variant("eager", sizes.rows)
    found = [plain, replace(plain, name="eager, no mask", masked=False)]
    for backend in BACKENDS:
        found += [
            replace(plain, name=f"{backend}, mask", backend=backend),
            replace(plain, name=f"{backend}, no mask", backend=backend, masked=False),
        ]
    found += [
        replace(plain, name="torch.compile", build="compiled"),
        replace(plain, name="torch.compile, no mask", build="compiled", masked=False),
        replace(plain, name="weights held in bf16 (bound)", build="bf16 weights", bound=True),
    ]
    return found + [replace(plain, name=f"{rows} rows", rows=rows) for rows in sizes.other_rows]


def measure(work: Work, sizes: Sizes, device: torch.device, tell: Callable[[str], None]) -> list[Timed]:
    """Times all variants of a cell, round by round. The weights of each way to build are made once."""
    makers = _Builds(work, sizes, device)
    ready = []
    for variant in variants(sizes):
        tell(f"variant {variant.name}")
        ready.append(makers.prepare(variant))
    tell(f"{sizes.rounds} rounds of all variants")
    times: list[list[float]] = [[] for _ in ready]
    for step in range(sizes.rounds):
        for at, (timed, lone, batch) in enumerate(ready):
            if lone is not None:
                with _as(timed.variant):
                    times[at].append(seconds(lambda one=lone, of=batch: one.train(step, of), device))  # type: ignore[misc]  # noqa: B023
    return [replace(timed, seconds=tuple(rounds)) for (timed, _, _), rounds in zip(ready, times, strict=True)]


class _Builds:
    """The cell, once for each way to build it."""

    def __init__(self, work: Work, sizes: Sizes, device: torch.device) -> None:
        self._work, self._sizes, self._device = work, sizes, device
        self._made: dict[Build, Lone] = {}
        self._batches: dict[int, MiniBatch] = {}

    def prepare(self, variant: Variant) -> tuple[Timed, Lone | None, MiniBatch | None]:
        """Runs a variant until it is warm, and weighs it; or says why it cannot run."""
        work = self._work if variant.rows == self._work.rows.count else self._work.cut(variant.rows)
        timed = Timed(variant, work)
        with warnings.catch_warnings(record=True) as said, _as(variant):
            warnings.simplefilter("always")
            try:
                lone = self._lone(variant.build)
                batch = self._batch(work)
                for step in range(WARM_UPS):
                    lone.train(step, batch)
                same = lone.rebuild_equals_forward(batch)
                with Allocation(self._device) as allocation:
                    lone.train(WARM_UPS, batch)
                operators = None if variant.build == "compiled" else _attention_of(lone)
            except Exception as error:  # whatever a compiler or a kernel raises is a row of the table
                failure = _reason(error, [str(one.message) for one in said])
            else:
                return replace(timed, peak_bytes=allocation.peak, same=same, attention=operators), lone, batch
        # the error's frames hold the graph of what failed
        gc.collect()
        forget(self._device)
        return replace(timed, failure=failure), None, None

    def _batch(self, work: Work) -> MiniBatch:
        if work.rows.count not in self._batches:
            self._batches[work.rows.count] = work.batch(self._device)
        return self._batches[work.rows.count]

    def _lone(self, build: Build) -> Lone:
        if build not in self._made:
            lone = Lone(self._work, self._device, self._sizes.optimizer)
            if build == "compiled":
                for layer in lone.stage.layers:
                    layer.compile(backend=self._sizes.compiler, dynamic=False)
            elif build == "bf16 weights":
                for module in lone.stage.layers.modules():
                    if isinstance(module, nn.Linear):
                        module.to(torch.bfloat16)
            self._made[build] = lone
        return self._made[build]


_usual = attention._attend


def _unmasked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """Attention of rows without padding. One function for good: torch.compile compiles again for another."""
    return _usual(query, key, value, None, causal)


@contextmanager
def _as(variant: Variant) -> Iterator[None]:
    """Has attention computed as the variant says. The model has no switch for it, nor needs one."""
    with ExitStack() as stack:
        if variant.backend is not None:
            stack.enter_context(sdpa_kernel(BACKENDS[variant.backend]))
        if not variant.masked:
            attention._attend = _unmasked
            stack.callback(setattr, attention, "_attend", _usual)
        yield


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators of attention run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "attention" in name:
            self.found.add(name.strip("_").removeprefix("scaled_dot_product_").removesuffix("_attention"))
        return func(*args, **(kwargs or {}))


def _attention_of(lone: Lone) -> str:
    """Returns the short names of these operators; ``math`` is made of plain ones and has none."""
    with _Names() as names:
        lone.rebuild_equals_forward()
    return ", ".join(sorted(names.found)) or "math"


def _reason(error: Exception, warned: list[str]) -> str:
    """Returns one line: what was raised, and what torch warned of, where that says more."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    told = [f"{type(error).__name__}: {first}"]
    for text in warned:
        line = text.split(" (Triggered internally")[0].strip().splitlines()
        idle = not line or line[0].endswith("because:") or "runtime disabled" in line[0]
        if not idle and line[0] not in told and ("ttention" in text or "SDP" in text):
            told.append(line[0])
    whole = "; ".join(told)
    return whole if len(whole) <= LONGEST_REASON else whole[: LONGEST_REASON - 3] + "..."
