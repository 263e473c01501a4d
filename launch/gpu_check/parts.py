"""The parts of the check, the most valuable first, each one resumable and within a budget of minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from launch.gpu_check import gradients, steps
from launch.gpu_check.two_stages import measure_two_stages
from launch.gpu_check.update import measure_update
from launch.gpu_check.work import Sizes, SkippedError, cell_workload, full_model_workload
from models.transformer import DecoderLayer, EncoderLayer
from suite.device import is_host
from suite.log import Log

Record = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A part; a GPU's estimates are guesses, because the check has run only on a CPU."""

    name: str
    title: str
    gpu_estimate_s: float
    cpu_estimate_s: float
    run: Callable[[Sizes, torch.device], Record]

    def estimate_s(self, device: torch.device) -> float:
        """Returns about how long it takes, at the sizes for this kind of device."""
        return self.cpu_estimate_s if is_host(device) else self.gpu_estimate_s


def _gradients(sizes: Sizes, device: torch.device) -> Record:
    compared = gradients.compare_all(sizes, device)
    return {"comparisons": [one.record() for one in compared], "faults": [one.fault for one in compared if one.fault]}


def _encoder(sizes: Sizes, device: torch.device) -> Record:
    return steps.measure_training(cell_workload(sizes, EncoderLayer), sizes, device)


def _large(sizes: Sizes, device: torch.device) -> Record:
    return steps.measure_training(cell_workload(sizes, EncoderLayer, sizes.large_tokens // sizes.time), sizes, device)


def _decoder(sizes: Sizes, device: torch.device) -> Record:
    return steps.measure_training(cell_workload(sizes, DecoderLayer), sizes, device)


def _full(sizes: Sizes, device: torch.device) -> Record:
    return steps.measure_training(full_model_workload(sizes), sizes, device)


PARTS = (
    Part("gradients", "gradients in fp64 and fp32, and a sum in bf16, compared with the CPU's", 60, 15, _gradients),
    Part("update", "a step with its update on every GPU, as in a run", 60, 40, measure_update),
    Part("stage", "a stage of encoder layers in bf16", 120, 20, _encoder),
    Part("large_micro_batch", "the same in large micro-batches", 120, 20, _large),
    Part("two_stages", "K = 2 by two processes", 60, 30, measure_two_stages),
    Part("decoder_stage", "a stage of decoder layers in bf16", 120, 20, _decoder),
    Part("full_model", "a whole model with embeddings and head", 120, 20, _full),
)


def run_parts(
    sizes: Sizes, device: torch.device, minutes: float, earlier: dict[str, Record], log: Log,
    save: Callable[[dict[str, Record]], object], parts: tuple[Part, ...] = PARTS,
) -> dict[str, Record]:  # fmt: skip
    """Returns the record of every part: ``status`` is done, skipped, failed or not run.

    A part that an ``earlier`` call finished without fault is not run again. A part starts only if its estimate fits
    what is left of the minutes. ``save`` gets all records after each part, so a call that is cut off loses one part.
    """
    begin = time.monotonic()
    records: dict[str, Record] = {}
    for part in parts:
        before = earlier.get(part.name, {})
        if before.get("status") == "done" and not before["faults"]:
            log(f"{part.name}: finished by an earlier call")
            records[part.name] = before | {"resumed": True}
            continue
        left, estimate = minutes * 60 - (time.monotonic() - begin), part.estimate_s(device)
        if estimate > left:
            why = f"its estimate of {estimate:.0f} s is more than the {max(0.0, left):.0f} s left of --minutes"
            log(f"{part.name}: not run: {why}")
            records[part.name] = before or {"status": "not run", "reason": why}  # an earlier fault stays one
            continue
        log(f"{part.name}: {part.title}, about {estimate:.0f} s")
        records[part.name] = _run(part, sizes, device)
        save(records)
        if fault := steps.free(device):
            log(f"the device cannot go on after {part.name}: {fault}; the next call runs the other parts")
            break
    return records


def _run(part: Part, sizes: Sizes, device: torch.device) -> Record:
    begin = time.monotonic()
    try:
        record = {"status": "done"} | part.run(sizes, device)
    except SkippedError as skip:
        return {"status": "skipped", "reason": str(skip)}
    except Exception as error:  # one part's failure, such as too little memory, must not hide the others
        record = {"status": "failed", "reason": steps.reason(error)}
    return record | {"seconds": time.monotonic() - begin}
