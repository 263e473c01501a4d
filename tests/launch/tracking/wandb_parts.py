"""Reads offline wandb records, with wandb's own reader."""

import json
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

READER = Path(find_spec("wandb").origin).parent / "bin/wandb-core"
"""The program behind ``wandb leet inspect``, which first imports all of wandb."""


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
    (file,) = store.glob("*.wandb")
    command = [READER, "leet", "inspect", "--no-observability", "--json", "--run-file", file, store.parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
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
