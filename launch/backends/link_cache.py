"""Link speeds measured by the doctor, cached for the planner."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suite.paths import write_atomically
from suite.pipeline.planning.simulate import Link


def file_of(cluster: str) -> str:
    return f"links-{re.sub('[^a-zA-Z0-9.]+', '-', cluster)}.json"


@dataclass(frozen=True)
class LinkSpeeds:
    """Link speeds of one cluster. None where a link does not exist, as without a second node."""

    cluster: str
    """The Ray cluster's own address (GCS)."""
    between_nodes: Link | None = None
    """Between workers of two nodes, for the slowest pair."""
    all_reduce: Link | None = None
    """With a worker on each node: for n workers and s bytes it takes latency + 2 (n - 1) / n * s / bytes_per_s."""


def write_links(cache: Path, links: LinkSpeeds) -> Path:
    """Writes a cluster's file in a cache folder atomically; returns its path."""
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / file_of(links.cluster)
    write_atomically(path, json.dumps(asdict(links), indent=1) + "\n")
    return path


def read_links(cache: Path, cluster: str) -> LinkSpeeds | None:
    """Returns a cluster's cached link speeds, or None if there is no valid file."""
    try:
        fields: dict[str, Any] = json.loads((cache / file_of(cluster)).read_text())
        for name in ("between_nodes", "all_reduce"):
            fields[name] = None if fields[name] is None else Link(**fields[name])
        return LinkSpeeds(**fields)
    except (OSError, ValueError, TypeError, KeyError):
        return None
