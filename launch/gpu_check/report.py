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

from launch.gpu_check.gradients import Comparison
from launch.gpu_check.kernels import Kernels
from launch.gpu_check.steps import TrainResult
from launch.gpu_check.variants import VariantResult
from launch.gpu_check.work import REMAT, Sizes

PACKAGES = ("torch", "triton", "numpy", "pydantic", "deepspeed", "ray")


@dataclass(frozen=True)
class Findings:
    """All results. ``product_rates`` are operations a second at the start and at the end of the check."""

    command: str
    device: torch.device
    sizes: Sizes
    product_rates: tuple[float, float]
    gradients: Sequence[Comparison]
    steps: Sequence[TrainResult]
    variants: Sequence[VariantResult]
    kernels: Kernels
    kernels_of: TrainResult
    seconds: float

    @property
    def faults(self) -> list[str]:
        """The faults of this device, each a clause."""
        faults = [comparison.fault for comparison in self.gradients] + [trained.fault for trained in self.steps]
        return [fault for fault in faults if fault is not None]

    @property
    def rate(self) -> float:
        """The reference of utilisation: the higher of the two rates, so that it is never overstated."""
        return max(self.product_rates)


def record(findings: Findings) -> dict[str, Any]:
    """Returns the JSON object; non-finite numbers, which JSON lacks, become strings."""
    plain = findings.variants[0]
    whole = {
        "command": findings.command,
        "machine": machine(findings.device),
        "versions": versions(),
        "deepspeed": "not used: the update is by the torch optimizer that DeepSpeed wraps at K = R = 1",
        "sizes": asdict(findings.sizes) | {"optimizer": findings.sizes.optimizer.model_dump()},
        "remat": REMAT,
        "product": {
            "side": findings.sizes.product,
            "measured": {
                "flops_per_s_at_begin": findings.product_rates[0],
                "flops_per_s_at_end": findings.product_rates[1],
            },
        },
        "gradients": [_comparison_record(comparison) for comparison in findings.gradients],
        "steps": [trained_record(trained, findings.rate) for trained in findings.steps],
        "variants": [timed_record(timed, plain, findings.rate) for timed in findings.variants],
        "kernels": {
            "of": findings.kernels_of.work.name,
            "measured": {"seconds_by_kind": findings.kernels.seconds, "total_s": findings.kernels.total_s},
            "computed": {"busy_share": findings.kernels.total_s / findings.kernels_of.train_s},
        },
        "measured": {"check_s": findings.seconds},
        "faults": findings.faults,
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
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _comparison_record(comparison: Comparison) -> dict[str, Any]:
    errors = [asdict(difference) for difference in comparison.differences]
    return {
        "dtype": comparison.dtype,
        "equal": comparison.equal,
        "measured": {"errors": errors, "least_rectifier_input": comparison.margin},
        "computed": {"tolerance": comparison.tolerance},
    }


def trained_record(trained: TrainResult, rate: float) -> dict[str, Any]:
    """Returns the record of one work's steps; utilisation is relative to ``rate``."""
    work = trained.work
    return {
        "name": work.name,
        "layers": len(work.layers),
        "parameters": work.parameters,
        "micro_batches": work.micro_batches,
        "rows": asdict(work.rows),
        "tokens": work.tokens,
        "loss_fell": trained.fell,
        "measured": {
            "step_s": trained.step_s, "train_s": trained.train_s, "update_s": trained.update_s,
            "action_s": trained.actions, "tokens_per_s": trained.tokens_per_s, "peak_bytes": trained.peak_bytes,
            "losses": trained.losses,
        },
        "computed": {
            "model_flops": work.model_flops, "hardware_flops": work.hardware_flops,
            "model_utilisation": work.model_flops / trained.step_s / rate,
            "hardware_utilisation": work.hardware_flops / trained.step_s / rate,
            "hardware_utilisation_without_update": work.hardware_flops / trained.train_s / rate,
            "peak_share": trained.peak_bytes / trained.profiled.peak_bytes,
        },
        "computed_from_measured_costs": asdict(trained.profiled),
        "estimated": asdict(trained.estimated) | {"device": trained.estimated_for},
    }  # fmt: skip


def timed_record(timed: VariantResult, plain: VariantResult, rate: float) -> dict[str, Any]:
    """Returns the record of one variant, compared with the plain one."""
    return {
        "name": timed.variant.name,
        "variant": asdict(timed.variant),
        "micro_batches": timed.work.micro_batches,
        "attention": timed.attention,
        "recompute_equals_forward": timed.bits_equal,
        "pays": timed.pays(plain),
        "failure": timed.failure,
        "measured": {"train_s": timed.median_s, "rounds_s": timed.seconds, "peak_bytes": timed.peak_bytes},
        "computed": {
            "tokens_per_s": timed.per_second(timed.work.tokens),
            "of_plain": _of_plain(timed, plain),
            "model_utilisation": timed.per_second(timed.work.model_flops, rate),
            "hardware_utilisation": timed.per_second(timed.work.hardware_flops, rate),
        },
    }


def _of_plain(timed: VariantResult, plain: VariantResult) -> float | None:
    """Returns its tokens a second relative to the plain variant's."""
    own, of_plain = timed.per_second(timed.work.tokens), plain.per_second(plain.work.tokens)
    return None if own is None or of_plain is None else own / of_plain
