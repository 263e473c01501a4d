"""What the check found, as one JSON object. Every number says how it was come by, by the key it lies under."""

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

from experiments.flops import hardware_flops, model_flops
from launch.gpu.gradients import Comparison
from launch.gpu.kernels import Kernels
from launch.gpu.lone import REMAT, rebuilt
from launch.gpu.steps import Trained
from launch.gpu.variants import Timed
from launch.gpu.work import Sizes

PACKAGES = ("torch", "triton", "numpy", "pydantic", "deepspeed", "ray")


@dataclass(frozen=True)
class Findings:
    """All that was measured. ``product_rates`` are operations a second at the begin and at the end of the check."""

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
        """What is wrong with this device, each a sentence without its end."""
        found = [one.fault for one in self.gradients] + [one.fault for one in self.steps]
        return [fault for fault in found if fault is not None]

    @property
    def rate(self) -> float:
        """What utilisation is a share of: the higher of the two, so that it is never flattered."""
        return max(self.product_rates)


def record(found: Findings) -> dict[str, Any]:
    """Returns the JSON object; a number that is not finite, for which JSON has no word, as a text."""
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
    return {key: _worded(value) for key, value in whole.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what the device and its host are."""
    host = {"host_cores": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()}
    if device.type != "cuda":
        return {"name": device.type, "driver": None} | host
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name, "driver": _driver(), "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count, "capability": f"{properties.major}.{properties.minor}",
    } | host  # fmt: skip


def versions() -> dict[str, str | None]:
    """Returns the versions of what computes; None for what is not installed."""
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


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _worded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _comparison(one: Comparison) -> dict[str, Any]:
    return {
        "dtype": one.dtype,
        "equal": one.equal,
        "measured": {"errors": [asdict(each) for each in one.differences], "least_rectifier_input": one.corner},
        "computed": {"tolerance": one.tolerance},
    }


def trained_record(one: Trained, rate: float) -> dict[str, Any]:
    """Returns one work's steps; utilisation is a share of ``rate``."""
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
    """Returns one variant, beside the plain one."""
    return {
        "name": one.variant.name,
        "variant": asdict(one.variant),
        "micro_batches": one.work.micro_batches,
        "attention": one.attention,
        "rebuild_equals_forward": one.same,
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
    return hardware_flops(one.work.forward_flops, count, rebuilt(count))


def _of_plain(one: Timed, plain: Timed) -> float | None:
    """How many tokens a second it has for each of the plain one."""
    if one.median_s is None or plain.median_s is None:
        return None
    return one.work.tokens / one.median_s / (plain.work.tokens / plain.median_s)
