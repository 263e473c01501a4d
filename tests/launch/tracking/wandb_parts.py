"""Reads offline wandb records, with wandb's own reader."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class Part:
    """One part of a wandb run: the records of one attempt."""

    run: dict[str, Any]
    config: dict[str, Any]
    history: list[dict[str, Any]]
    summary: dict[str, Any]
    artifacts: dict[str, set[str]]
    """Files of each artifact, by its name."""
    metrics: dict[str, str | None]
    """The x axis of each defined metric, by its name or pattern."""


def parts(folder):
    """Returns the parts below a run's folder, the oldest first."""
    return [read(store) for store in sorted(folder.glob("wandb/offline-run-*"))]


def read(store):
    """Returns one part."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(store)], capture_output=True, text=True,
        timeout=100, check=True,
    )  # fmt: skip
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    (run,) = (entry["run"] for entry in entries if "run" in entry)
    summary = {}
    for entry in entries:
        summary |= entry.get("summary", {}).get("update", {})
    artifacts = {
        entry["artifact"]["name"]: {file["path"] for file in entry["artifact"]["manifest"]["contents"]}
        for entry in entries
        if "artifact" in entry
    }
    history = [entry["history"]["item"] for entry in entries if "history" in entry]
    defined = [entry["metric"] for entry in entries if "metric" in entry]
    metrics = {metric.get("name") or metric["glob_name"]: metric.get("step_metric") for metric in defined}
    return Part(run, run["config"]["update"], history, summary, artifacts, metrics)
