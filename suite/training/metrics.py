"""The names of a run's metrics, for those who write them and those who read them.

    metrics.jsonl, wandb     one line per step: {"step": 3, "train/loss": 6.1, "train/tokens": 12288, ...}

``docs/metrics.md`` says what each one means. A line without ``train/loss``, such as one of a validation, is no step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.errors import RunFileError
from suite.training.jsonl import parsed, raw_lines

STEP = "step"
"""Steps done: the x axis of all others."""

LOSS, GRAD_NORM, LR = "train/loss", "train/grad_norm", "train/lr"

APPLIED = "train/applied"
"""1, or 0 for a step that was skipped because of non-finite numbers."""

STEP_S = "throughput/step_s"

TFLOPS_PER_DEVICE, MFU, HFU = "throughput/tflops_per_device", "throughput/mfu", "throughput/hfu"
"""Model operations per second of a device in 10^12; ``suite.training.utilization``."""

PEAK_GIB, PEAK_SHARE = "memory/peak_gib", "memory/peak_share"
"""The highest peak of all workers so far, and its share of the GPU's memory."""

BUBBLE = "pipeline/bubble"
"""The idle share of a step that is traced."""

SLOW = "slow"
"""How many times its peers' seconds a slow worker takes (``stage_metric``)."""

NAMESPACES = ("train", "valid", "throughput", "memory", "pipeline", "scores")
"""All names but ``step`` are in one of them."""


def train_metric(name: str) -> str:
    """Returns the name of the loss's own metric on the training data, such as ``train/nll``."""
    return f"train/{name}"


def own_metrics(line: Mapping[str, Any], unit: str) -> list[str]:
    """Returns the names of the loss's own metrics in the line of a step; ``loss`` where it has none."""
    known = {LOSS, GRAD_NORM, LR, APPLIED, units_done(unit)}
    names = [name.removeprefix("train/") for name in line if name.startswith("train/") and name not in known]
    return names or ["loss"]


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


def worker_of(metric: str, name: str) -> tuple[int, int] | None:
    """Returns replica and stage of a ``stage_metric`` of this name, None for another metric."""
    found = re.fullmatch(rf"pipeline/stage\.(\d+)\.(\d+)/{name}", metric)
    return (int(found[1]), int(found[2])) if found else None


def is_step(line: dict[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` is a training step."""
    return LOSS in line


MOST = 10_000
"""A page has at least so many steps of a longer run, and fewer than twice as many."""

_LOSS_KEY, _VALID_KEY = f'"{LOSS}":'.encode(), b'"valid/'


@dataclass(frozen=True)
class History:
    """Steps and validations of a run, in order."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def read_history(path: Path) -> History:
    """Returns the steps and validations in a ``metrics.jsonl``: of a short run all; of a longer one every second,
    fourth, ... of both, the steps of these validations, and the last step. So the memory does not grow with the run.

    Skips damaged lines.
    """
    steps, validations, last = _Thinned(), _Thinned(), (0, b"")
    for number, raw in enumerate(raw_lines(path)):
        if _LOSS_KEY in raw and raw.endswith(b"}\n"):
            last = (number, raw)
            steps.add(last)
        if _VALID_KEY in raw:
            validations.add((number, raw, last))
    chosen = dict([*steps.kept, *(step for _, _, step in validations.kept), last])
    return History(
        [line for number in sorted(chosen) if (line := parsed(chosen[number])) is not None],
        [line for _, raw, _ in validations.kept if (line := parsed(raw)) is not None],
    )


def read_steps(path: Path) -> list[dict[str, Any]]:
    return read_history(path).steps


def every_step(path: Path) -> Iterator[dict[str, Any]]:
    """Yields every step, one in memory at a time."""
    for raw in raw_lines(path):
        if _LOSS_KEY in raw and (line := parsed(raw)) is not None:
            yield line


def check_metrics(path: Path) -> None:
    """Raises RunFileError for a damaged line that is not the torn end of the file: the run's record would lack its
    step."""
    for number, raw in enumerate(raw_lines(path), 1):
        looks_whole = raw.startswith(b"{") and raw.endswith(b"}\n") and raw.isascii() and b"\0" not in raw
        if not looks_whole and raw.endswith(b"\n") and parsed(raw) is None:
            raise RunFileError(
                f"line {number} of {path} is damaged; restore the file from a copy, or delete the line with `sed -i "
                f"{number}d {path}`, after which the run's numbers lack this step"
            )


class _Thinned:
    """Keeps every item, or every second, fourth, ... once there are ``2 * MOST``."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._every, self._seen = 1, 0

    def add(self, item: Any) -> None:
        if self._seen % self._every == 0:
            self.kept.append(item)
            if len(self.kept) == 2 * MOST:
                self.kept, self._every = self.kept[::2], 2 * self._every
        self._seen += 1
