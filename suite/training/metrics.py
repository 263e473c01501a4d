"""The names of a run's metrics, for those who write them and those who read them.

    metrics.jsonl, wandb     one line per step: {"step": 3, "train/loss": 6.1, "train/tokens": 12288, ...}

``docs/metrics.md`` says what each one means. A line without ``train/loss``, such as one of a validation, is no step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suite.errors import SettingError
from suite.training.jsonl import read_lines

STEP = "step"
"""Steps done: the x axis of all others."""

LOSS, GRAD_NORM, LR = "train/loss", "train/grad_norm", "train/lr"

APPLIED = "train/applied"
"""1, or 0 for a step that was skipped because of non-finite numbers."""

STEP_S = "throughput/step_s"

TFLOPS_PER_DEVICE, MFU, HFU = "throughput/tflops_per_device", "throughput/mfu", "throughput/hfu"
"""Model operations per second of a device in 10^12; ``suite.training.utilization``."""

PEAK_GIB, PEAK_SHARE = "memory/peak_gib", "memory/peak_share"
"""Of the worker with the highest peak so far; the share is that of its GPU's memory."""

BUBBLE = "pipeline/bubble"
"""Of a step that is traced."""

NAMESPACES = ("train", "valid", "throughput", "memory", "pipeline", "scores")
"""All names but ``step`` are in one of them."""

_OLD_LOSS = "loss"
"""The name of the loss up to version 0.1."""


def train_metric(name: str) -> str:
    """Returns the name of the loss's own metric on the training data, such as ``train/nll``."""
    return f"train/{name}"


def units_done(unit: str) -> str:
    """Returns the name of the units trained so far, such as ``train/tokens``."""
    return f"train/{unit}"


def units_per_s(unit: str) -> str:
    """Returns the name of the units per second of all devices, such as ``throughput/tokens_per_s``."""
    return f"throughput/{unit}_per_s"


def units_per_s_per_device(unit: str) -> str:
    """Returns the name of the units per second of one device."""
    return f"throughput/{unit}_per_s_per_device"


def stage_metric(replica: int, stage: int, name: str) -> str:
    """Returns the name of a worker's own metric, such as ``pipeline/stage.0.2/cpu_percent``."""
    return f"pipeline/stage.{replica}.{stage}/{name}"


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` is a training step."""
    return LOSS in line


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns the training steps in a ``metrics.jsonl``. Raises SettingError for one of an older version."""
    lines = read_lines(path)
    if any(_OLD_LOSS in line for line in lines):
        raise SettingError(
            f"{path} has the names of an older version of the suite, such as {_OLD_LOSS} for {LOSS}; read it and "
            "resume its run with the version that wrote it, or start a new run"
        )
    return [line for line in lines if is_step(line)]
