"""The link speeds the doctor measured, kept for the plan."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from suite.pipeline.simulate import Link


def file_of(cluster: str) -> str:
    """Returns the name of a cluster's file."""
    return f"links-{re.sub('[^a-zA-Z0-9.]+', '-', cluster)}.json"


@dataclass(frozen=True)
class Links:
    """What messages take on one cluster. None where there was nothing to measure: no second node, no second device."""

    cluster: str
    """The address by which a Ray cluster knows itself, or this machine's name."""
    pairs: tuple[str, ...]
    """The nodes' names, sorted."""
    within: Link | None = None
    """Between two workers of a node: the slowest node's."""
    between: Link | None = None
    """Between workers of two nodes: the slowest pair's."""
    all_reduce: Link | None = None
    """One worker a node, or two of the only node. Bytes a second that go out of each worker: for n workers and s bytes
    the reduction takes latency + 2 (n - 1) / n * s / bytes_per_s, as ``suite.pipeline.plan`` has it."""
    alone: Link | None = None
    """As ``within``, in plain processes that Ray did not start, on the machine the doctor ran on."""
    measured: float = field(default_factory=time.time)
    """Seconds since 1970."""


def write_links(cache: Path, links: Links) -> Path:
    """Writes a cluster's file in a cache folder, whole or not at all, and returns its place."""
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / file_of(links.cluster)
    draft = place.with_suffix(f".draft-{uuid4().hex}")
    draft.write_text(json.dumps(asdict(links), indent=1) + "\n")
    draft.replace(place)
    return place


def read_links(cache: Path, cluster: str) -> Links | None:
    """Returns what was measured last of a cluster, or None where there is nothing whole."""
    try:
        kept: dict[str, Any] = json.loads((cache / file_of(cluster)).read_text())
        for name in ("within", "between", "all_reduce", "alone"):
            kept[name] = None if kept[name] is None else Link(**kept[name])
        return Links(**kept | {"pairs": tuple(kept["pairs"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
