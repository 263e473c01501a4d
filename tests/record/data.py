"""Digests of all prepared data: what the named experiments and the sweeps read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.record.job import Job

SETS = {
    "catalogues, all languages": ("t128_6b", ""),
    "catalogues, five languages": ("romance_strings", ""),
    "django": ("t12_400m", "text.corpus=django text.vocabulary=1200"),
    "docstrings": ("transformer_13", ""),
    "django documents": ("transformer_13", "text.corpus=django text.vocabulary=500 text.length=32"),
    "fashion": ("amoebanet_fashion", ""),
    "mnist": ("amoebanet_fashion", "images.source=mnist images.fit=resize"),
    "digits": ("amoebanet_fashion", "images.source=digits images.fit=resize"),
}


METADATA = ("manifest.json", "state.json", "dataset_info.json")
"""Files about other files."""


def data_jobs(work: Path, saved: dict[str, Any]) -> Iterator[Job]:
    for name, (experiment, settings) in SETS.items():
        yield Job(name, digests, (experiment, settings, work / "cache"))


def digests(experiment: str, settings: str, cache: Path) -> dict[str, Any]:
    folder = prepared(experiment, settings, cache)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in METADATA]
    names = [str(path.relative_to(folder)) for path in files]
    return {"result": dict(zip(names, (hashlib.sha256(path.read_bytes()).hexdigest() for path in files), strict=True))}


def prepared(experiment: str, settings: str, cache: Path) -> Path:
    """Prepares the data of an experiment at scale laptop below a folder; returns where it is."""
    from experiments.base.cluster import Cluster
    from experiments.registry import resolve

    chosen, _ = resolve(experiment, "laptop", Cluster(2, 2**33, "cpu"), settings)
    data = chosen.prepare_data(cache, lambda text: None)
    if data != chosen.data:
        raise RuntimeError(f"{chosen.data} could not be fetched, {data} was prepared")
    return chosen.data_folder(cache)
