"""What a run computed, read from its folder: losses, gradient norms, and digests of weights by layer."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def outcome(run: Path) -> dict[str, Any]:
    """Returns the losses and gradient norms of all steps, the validations, digests of the last checkpoint, and the
    actions of each worker."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()]
    steps = {line["step"]: line for line in lines if "train/loss" in line}  # a repeated step replaces the first
    valid = [{name: line[name] for name in line if "seconds" not in name} for line in lines if "train/loss" not in line]
    weights, state = checkpoint_digests(run / "checkpoints")
    return {
        "loss": [steps[step]["train/loss"] for step in sorted(steps)],
        "gradient norm": [steps[step]["train/grad_norm"] for step in sorted(steps)],
        "validation": valid,
        "weights": weights,
        "optimizer state": state,
        "all weights": digest_of_text("".join(weights.values())),
        "actions": {path.stem: actions(path) for path in sorted((run / "trace").glob("*.jsonl"))},
    }


def actions(trace: Path) -> list[str]:
    """Returns what a worker executed in its first traced step: kind, micro-batch and cell, such as R0.1."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    spans = next(line["spans"] for line in lines if "spans" in line)
    return [f"{kind}{at}.{cell}" for kind, at, _, _, cell in spans if kind in "FRIBW"]


def checkpoint_digests(checkpoints: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the digests of each layer's weights and of its optimizer state, in the newest whole checkpoint."""
    newest = max(path.parent for path in checkpoints.glob("[0-9]*/manifest.json"))
    weights, state = {}, {}
    for at, path in enumerate(sorted(newest.glob("layer-*.safetensors"))):
        found = tensor_digests(path)
        weights[f"layer {at}"] = digest_of_text(str(found.pop("value", [])))
        state[f"layer {at}"] = digest_of_text(str(sorted(found.items())))
    return weights, state


def tensor_digests(path: Path) -> dict[str, list[tuple[str, str, str, str]]]:
    """Returns name, type, shape and digest of a file's tensors, grouped by the first part of the name."""
    found = defaultdict(list)
    with safe_open(path, "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name).contiguous()
            bits = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            entry = name, str(tensor.dtype), str(tuple(tensor.shape)), bits
            found[name.partition("/")[0]].append(entry)
    return dict(found)


def digest_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
