"""Times variants of the same cell in one run, in alternating rounds, so that clock drift affects all of them.

A variant that cannot run has a reason in one line. Timed are forward, recomputation and backward of a mini-batch with
equal rows; updates are the same for all. A variant pays if its median time a token is below the plain variant's fastest
round, and if its recomputation is bit-identical to its forward: otherwise a stage would send other activations than it
differentiates.
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

from launch.gpu_check.single_stage import SingleStageTrainer, empty_cache, seconds
from launch.gpu_check.work import SingleStageWorkload, Sizes
from models import blocks
from suite.pipeline.model.microbatch import MiniBatch
from suite.pipeline.planning.memory_tracker import MemoryTracker

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
    """How layers are built, the attention backend, with or without the model's mask, and rows of a micro-batch.

    torch chooses the attention backend if ``backend`` is None. ``bound`` marks a variant that cannot train and only
    shows how much there is to gain.
    """

    name: str
    rows: int
    build: Build = "eager"
    backend: str | None = None
    masked: bool = True
    bound: bool = False


@dataclass(frozen=True)
class VariantResult:
    """The result of a variant: seconds of each round, or in ``failure`` the reason why it cannot run."""

    variant: Variant
    work: SingleStageWorkload
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    """On top of weights and gradients, which are allocated before."""
    bits_equal: bool | None = None
    """Whether recomputation is bit-identical to the forward."""
    attention: str | None = None
    """The operators that computed attention; None if they cannot be observed."""
    failure: str | None = None

    @property
    def median_s(self) -> float | None:
        """Median seconds of all rounds."""
        return statistics.median(self.seconds) if self.seconds else None

    def per_second(self, amount: float, unit: float = 1.0) -> float | None:
        """Returns a step's amount of a unit a second; None if the variant cannot run."""
        return None if self.median_s is None else amount / self.median_s / unit

    def pays(self, plain: VariantResult) -> bool | None:
        """Returns whether it is faster than every round of the plain variant; None for a bound and the plain one."""
        if self.variant.bound or self is plain:
            return None
        if self.median_s is None or not plain.seconds or not self.bits_equal:
            return False
        return self.median_s / self.work.tokens < min(plain.seconds) / plain.work.tokens


def variants(sizes: Sizes) -> list[Variant]:
    """Returns all variants, the plain one first."""
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


def measure_variants(
    work: SingleStageWorkload, sizes: Sizes, device: torch.device, log: Callable[[str], None]
) -> list[VariantResult]:
    """Times all variants of a cell, round by round. Variants with the same build share weights."""
    trainers = _TrainerCache(work, sizes, device)
    ready = []
    for variant in variants(sizes):
        log(f"variant {variant.name}")
        ready.append(trainers.prepare(variant))
    log(f"{sizes.rounds} rounds of all variants")
    times: list[list[float]] = [[] for _ in ready]
    for step in range(sizes.rounds):
        for at, (timed, trainer, batch) in enumerate(ready):
            if trainer is not None:
                with _attention_as(timed.variant):
                    times[at].append(seconds(lambda one=trainer, of=batch: one.train(step, of), device))  # type: ignore[misc]  # noqa: B023
    return [replace(timed, seconds=tuple(rounds)) for (timed, _, _), rounds in zip(ready, times, strict=True)]


class _TrainerCache:
    """The cell's trainers, one for each build."""

    def __init__(self, work: SingleStageWorkload, sizes: Sizes, device: torch.device) -> None:
        self._work, self._sizes, self._device = work, sizes, device
        self._trainers: dict[Build, SingleStageTrainer] = {}
        self._batches: dict[int, MiniBatch] = {}

    def prepare(self, variant: Variant) -> tuple[VariantResult, SingleStageTrainer | None, MiniBatch | None]:
        """Warms up a variant and measures its memory, or records why it cannot run."""
        work = self._work if variant.rows == self._work.rows.count else self._work.cut(variant.rows)
        timed = VariantResult(variant, work)
        with warnings.catch_warnings(record=True) as caught_warnings, _attention_as(variant):
            warnings.simplefilter("always")
            try:
                trainer = self._trainer(variant.build)
                batch = self._batch(work)
                for step in range(WARM_UPS):
                    trainer.train(step, batch)
                bits_equal = trainer.recompute_equals_forward(batch)
                with MemoryTracker(self._device) as memory_tracker:
                    trainer.train(WARM_UPS, batch)
                operators = None if variant.build == "compiled" else _attention_of(trainer)
            except Exception as error:  # any error of a compiler or kernel becomes a row of the table
                failure = _reason(error, [str(one.message) for one in caught_warnings])
            else:
                peak = memory_tracker.peak
                return replace(timed, peak_bytes=peak, bits_equal=bits_equal, attention=operators), trainer, batch
        # the error's frames held the failed graph
        gc.collect()
        empty_cache(self._device)
        return replace(timed, failure=failure), None, None

    def _batch(self, work: SingleStageWorkload) -> MiniBatch:
        if work.rows.count not in self._batches:
            self._batches[work.rows.count] = work.batch(self._device)
        return self._batches[work.rows.count]

    def _trainer(self, build: Build) -> SingleStageTrainer:
        if build not in self._trainers:
            trainer = SingleStageTrainer(self._work, self._device, self._sizes.optimizer)
            if build == "compiled":
                for layer in trainer.stage.layers:
                    layer.compile(backend=self._sizes.compiler, dynamic=False)
            elif build == "bf16 weights":
                for module in trainer.stage.layers.modules():
                    if isinstance(module, nn.Linear):
                        module.to(torch.bfloat16)
            self._trainers[build] = trainer
        return self._trainers[build]


_original_attend = blocks._attend


def _unmasked(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    """Attention of rows that are one sentence each. Always the same function: torch.compile recompiles for another."""
    return _original_attend(query, key, value, None, causal)


@contextmanager
def _attention_as(variant: Variant) -> Iterator[None]:
    """A context with the variant's attention; the model itself has no switch for it."""
    with ExitStack() as stack:
        if variant.backend is not None:
            stack.enter_context(sdpa_kernel(BACKENDS[variant.backend]))
        if not variant.masked:
            blocks._attend = _unmasked
            stack.callback(setattr, blocks, "_attend", _original_attend)
        yield


class _AttentionOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which attention operators run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "attention" in name:
            self.operators.add(name.strip("_").removeprefix("scaled_dot_product_").removesuffix("_attention"))
        return func(*args, **(kwargs or {}))


def _attention_of(trainer: SingleStageTrainer) -> str:
    """Returns short names of the attention operators; ``math`` consists of plain operators and has none."""
    with _AttentionOperators() as names:
        trainer.recompute_equals_forward()
    return ", ".join(sorted(names.operators)) or "math"


def _reason(error: Exception, warning_texts: list[str]) -> str:
    """Returns one line: the error, and torch's warnings if they say more."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    reasons = [f"{type(error).__name__}: {first}"]
    for text in warning_texts:
        line = text.split(" (Triggered internally")[0].strip().splitlines()
        idle = not line or line[0].endswith("because:") or "runtime disabled" in line[0]
        if not idle and line[0] not in reasons and ("ttention" in text or "SDP" in text):
            reasons.append(line[0])
    reason = "; ".join(reasons)
    return reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."
