"""``make fetch``: a job's records, pictures, reports and logs, from the cluster into one's own ``runs/``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from rich.console import Console

from launch.jobs import packing
from launch.jobs.door import Door, JobError
from launch.jobs.small import run_small
from launch.progress import MARK
from launch.runs import RUNS
from suite.errors import PathError
from suite.paths import extract_files, safe_join

LIMIT = 30 * 2**20
"""Bytes of the archive: it goes through the memory of the cluster's dashboard."""

DEADLINE_S = 120.0
"""Seconds for the files to be packed."""

FETCHED = "fetched.json"
"""File of a run's folder that says which cluster and job it was fetched from."""


def fetch(asked: str, job: str, console: Console) -> None:
    """Fetches what a job has left so far, and its log; a second time, what is there since.

    Raises JobError for an unknown job, one without a run, too much of it, or a folder here that is another run's.
    """
    door = Door(asked)
    told = door.find(job).metadata or {}
    wanted = {"storage": told["storage"], "job": job, "beside": told["beside"].split(), "limit": LIMIT}
    try:
        said = run_small(door, Path(packing.__file__), "GPIPE_PACK", wanted, DEADLINE_S)
    except JobError as error:
        raise JobError(f"job {job} cannot be fetched: {str(error).partition('failed: ')[2] or error}") from None
    head, packed = read_archive(said)
    source = {"job": job, "address": door.address}
    unpack(packed, head["folders"], RUNS, source)
    log = [line for line in door.get_job_logs(job).splitlines() if not line.startswith(MARK)]
    for folder in head["folders"]:
        (RUNS / folder / "job.log").write_text("\n".join(log) + "\n")
        console.print(f"folder: {(RUNS / folder).resolve()}")
        if folder in head["training"]:
            console.print("  it is being trained: fetch it again at its end, what wandb records comes then")
    console.print(
        f"fetched {head['files']} files, {head['bytes'] / 2**20:.2f} MiB packed; checkpoints stay in {told['storage']}"
    )


def read_archive(said: str) -> tuple[dict[str, Any], bytes]:
    """Returns the head and the bytes that ``launch/jobs/packing.py`` printed. Raises JobError for any others."""
    lines = said.splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith(packing.BEGIN)]
    if not begins or packing.END not in lines[begins[-1] :]:
        raise JobError("the archive did not come whole: its end is missing; fetch it again")
    begin = begins[-1]
    head = json.loads(lines[begin].removeprefix(packing.BEGIN))
    try:
        packed = base64.b64decode("".join(lines[begin + 1 : lines.index(packing.END, begin)]), validate=True)
    except binascii.Error:
        packed = b""
    found = hashlib.sha256(packed).hexdigest()
    if found != head["sha256"]:
        raise JobError(
            f"the archive came damaged: {len(packed)} of {head['bytes']} bytes, sha256 {found[:12]} instead of "
            f"{head['sha256'][:12]}; fetch it again"
        )
    return head, packed


def _is_of(note: Path, address: str) -> bool:
    return note.exists() and json.loads(note.read_text())["address"] == address


def unpack(packed: bytes, folders: list[str], runs: Path, source: dict[str, str]) -> None:
    """Unpacks an archive below ``runs``. Raises JobError for a path that leads out of it, and where one of the folders
    is there already and was not fetched from the same cluster; then nothing is written. On one cluster a folder is one
    run, whichever job went on with it."""
    for folder in folders:
        place = _below(runs, folder)
        note = place / FETCHED
        if place.exists() and not _is_of(note, source["address"]):
            raise JobError(
                f"{place} is there already, and not from the cluster at {source['address']}; move it away and fetch "
                "again"
            )
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for name in archive.getnames():
            if not any(_below(runs, name).is_relative_to(_below(runs, one)) for one in folders):
                raise JobError(f"the archive holds {name}, which is no file of these runs; nothing was unpacked")
        try:
            extract_files(archive, runs)
        except PathError as error:
            raise JobError(f"{error}; nothing was unpacked") from None
    for folder in folders:
        (runs / folder).mkdir(parents=True, exist_ok=True)
        (runs / folder / FETCHED).write_text(json.dumps(source) + "\n")


def _below(runs: Path, path: str) -> Path:
    try:
        return safe_join(runs, path)
    except PathError as error:
        raise JobError(f"the archive names a path outside: {error}; nothing was unpacked") from None
