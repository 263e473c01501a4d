"""Profiles a step on the device: its longest kernels, and the share of matrix products."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from launch.gpu_check.single_stage import SingleStageTrainer, synchronise

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|mha_|sdp|attention|softmax"),
    ("products", r"gemm|nvjet|xmma|cutlass|cublas|splitk|addmm|bmm|::mm\b"),
    ("casts and copies", r"copy|memcpy|memset|fill"),
    ("norms", r"layer_?norm|gammabeta|batch_?norm"),
    ("dropout", r"dropout|masked_scale"),
    ("sums of gradients and residuals", r"functor_?add|cudafunctoronself_add|add_kernel|::add"),
    ("other elementwise", r"elementwise|triton|pointwise|threshold|clamp|::mul|::sub|::div"),
    ("reductions", r"reduce|::sum|::mean|norm"),
)
"""A kernel has the first kind whose pattern its name matches, ignoring case."""

OTHER = "other"

LONGEST = 30


@dataclass(frozen=True)
class Kernels:
    """One step: ``seconds`` by kind of kernel, and the profiler's own ``table``."""

    seconds: dict[str, float]
    table: str

    @property
    def total_s(self) -> float:
        """The sum over all kernels."""
        return sum(self.seconds.values())


def kernels(trainer: SingleStageTrainer, step: int) -> Kernels:
    """Profiles forward, recomputation and backward of a mini-batch; on the CPU, operators instead of kernels."""
    cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as run:
        trainer.train(step)
        synchronise(trainer.device)
    trainer.clear()
    averages = run.key_averages()
    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    found: dict[str, float] = {}
    for event in averages:
        # a user annotation spans kernels that are counted themselves
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False):
            name = kind_of(event.key)
            found[name] = found.get(name, 0.0) + _seconds(event, cuda)
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    table = averages.table(sort_by=order, row_limit=LONGEST, max_name_column_width=100)
    return Kernels(dict(sorted(found.items(), key=lambda pair: -pair[1])), table)


def kind_of(kernel: str) -> str:
    """Returns the kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def _seconds(event: Any, cuda: bool) -> float:
    return float(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
