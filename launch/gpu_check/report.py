"""The results of the check as one JSON object, whose keys say whether a number is measured, computed or estimated."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from experiments.gpu_check.flops import hardware_flops, model_flops
from launch.gpu_check.gradients import Comparison
from launch.gpu_check.kernels import Kernels
from launch.gpu_check.single_stage import REMAT, recomputed
from launch.gpu_check.steps import Trained
from launch.gpu_check.variants import Timed
from launch.gpu_check.work import Sizes

PACKAGES = ("torch", "triton", "numpy", "pydantic", "deepspeed", "ray")


@dataclass(frozen=True)
class Findings:
    """All results. ``product_rates`` are operations a second at the start and at the end of the check."""

    command: str
    device: torch.device
    sizes: Sizes
    product_rates: tuple[float, float]
    gradients: Sequence[Comparison]
    steps: Sequence[Trained]
    variants: Sequence[Timed]
    kernels: Kernels
    kernels_of: Trained
    seconds: float

    @property
    def faults(self) -> list[str]:
        """The faults of this device, each a clause."""
        found = [one.fault for one in self.gradients] + [one.fault for one in self.steps]
        return [fault for fault in found if fault is not None]

    @property
    def rate(self) -> float:
        """The reference of utilisation: the higher of the two rates, so that it is never overstated."""
        return max(self.product_rates)


def record(found: Findings) -> dict[str, Any]:
    """Returns the JSON object; non-finite numbers, which JSON lacks, become strings."""
    plain = found.variants[0]
    whole = {
        "command": found.command,
        "machine": machine(found.device),
        "versions": versions(),
        "deepspeed": "not used: the update is by the torch optimizer that DeepSpeed wraps at K = R = 1",
        "sizes": asdict(found.sizes) | {"optimizer": found.sizes.optimizer.model_dump()},
        "remat": REMAT,
        "product": {
            "side": found.sizes.product,
            "measured": {"flops_per_s_at_begin": found.product_rates[0], "flops_per_s_at_end": found.product_rates[1]},
        },
        "gradients": [_comparison(one) for one in found.gradients],
        "steps": [trained_record(one, found.rate) for one in found.steps],
        "variants": [timed_record(one, plain, found.rate) for one in found.variants],
        "kernels": {
            "of": found.kernels_of.work.name,
            "measured": {"seconds_by_kind": found.kernels.seconds, "total_s": found.kernels.total_s},
            "computed": {"busy_share": found.kernels.total_s / found.kernels_of.train_s},
        },
        "measured": {"check_s": found.seconds},
        "faults": found.faults,
    }
    return {key: _jsonable(value) for key, value in whole.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """Returns the properties of the device and its host."""
    host = {"host_cores": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()}
    if device.type != "cuda":
        return {"name": device.type, "driver": None} | host
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "driver": _driver(), "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
    } | host  # fmt: skip


def versions() -> dict[str, str | None]:
    """Returns the versions of the relevant packages; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    found["cudnn"] = str(torch.backends.cudnn.version() or "none")  # type: ignore[no-untyped-call]
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {"torch": torch.__version__}


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "dtype": one.dtype,
        "equal": one.equal,
        "measured": {"errors": [asdict(each) for each in one.differences], "least_rectifier_input": one.margin},
        "computed": {"tolerance": one.tolerance},
    }


def trained_record(one: Trained, rate: float) -> dict[str, Any]:
    """Returns the record of one work's steps; utilisation is relative to ``rate``."""
    work = one.work
    return {
        "name": work.name,
        "layers": len(work.layers),
        "parameters": work.parameters,
        "micro_batches": work.micro_batches,
        "rows": asdict(work.rows),
        "tokens": work.tokens,
        "loss_fell": one.fell,
        "measured": {
            "step_s": one.step_s, "train_s": one.train_s, "update_s": one.update_s, "action_s": one.actions,
            "tokens_per_s": one.tokens_per_s, "peak_bytes": one.peak_bytes, "losses": one.losses,
        },
        "computed": {
            "model_flops": one.model_flops, "hardware_flops": one.hardware_flops,
            "model_utilisation": one.model_flops / one.step_s / rate,
            "hardware_utilisation": one.hardware_flops / one.step_s / rate,
            "hardware_utilisation_without_update": one.hardware_flops / one.train_s / rate,
            "peak_share": one.peak_bytes / one.profiled.peak_bytes,
        },
        "computed_from_measured_costs": asdict(one.profiled),
        "estimated": asdict(one.estimated) | {"device": one.estimated_for},
    }  # fmt: skip


def timed_record(one: Timed, plain: Timed, rate: float) -> dict[str, Any]:
    """Returns the record of one variant, compared with the plain one."""
    return {
        "name": one.variant.name,
        "variant": asdict(one.variant),
        "micro_batches": one.work.micro_batches,
        "attention": one.attention,
        "recompute_equals_forward": one.bits_equal,
        "pays": one.pays(plain),
        "failure": one.failure,
        "measured": {"train_s": one.median_s, "rounds_s": one.seconds, "peak_bytes": one.peak_bytes},
        "computed": {
            "tokens_per_s": None if one.median_s is None else one.work.tokens / one.median_s,
            "of_plain": _of_plain(one, plain),
            "model_utilisation": None if one.median_s is None else _model(one) / one.median_s / rate,
            "hardware_utilisation": None if one.median_s is None else _hardware(one) / one.median_s / rate,
        },
    }


def _model(one: Timed) -> float:
    return model_flops(one.work.forward_flops, one.work.micro_batches)


def _hardware(one: Timed) -> float:
    count = one.work.micro_batches
    return hardware_flops(one.work.forward_flops, count, recomputed(count))


def _of_plain(one: Timed, plain: Timed) -> float | None:
    """Returns its tokens a second relative to the plain variant's."""
    if one.median_s is None or plain.median_s is None:
        return None
    return one.work.tokens / one.median_s / (plain.work.tokens / plain.median_s)
