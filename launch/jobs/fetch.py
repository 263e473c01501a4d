"""``make fetch``: copies a job's records, plots, reports and logs from the cluster into the local ``runs/``."""

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

from launch.jobs import remote_archive
from launch.jobs.client import JobClient, JobError
from launch.jobs.remote_script import run_script
from launch.runs.store import RUNS
from launch.tracking.progress import MARK
from suite.errors import PathError
from suite.paths import check_files, read_json, safe_join, write_atomically

MAX_BYTES = 30 * 2**20
"""Largest archive in bytes: it passes through the memory of the cluster's dashboard."""

FETCHED = "fetched.json"
"""File in a run's folder that names the storage, address and job it was fetched from."""


def fetch(address: str, job: str, console: Console) -> None:
    """Fetches a job's files so far and its log; a second call updates them.

    Raises JobError for an unknown job, a job without a run, too many bytes, or a local folder of another run.
    """
    client = JobClient(address)
    metadata = client.find(job).metadata or {}
    request = {
        "storage": metadata["storage"],
        "job": job,
        "extra_folders": metadata["extra_folders"].split(),
        "limit": MAX_BYTES,
    }
    try:
        printed = run_script(client, remote_archive, request, deadline_s=120.0)
    except JobError as error:
        raise JobError(f"job {job} cannot be fetched: {str(error).partition('failed: ')[2] or error}") from None
    head, packed = read_archive(printed)
    source = {"job": job, "address": client.address, "storage": head["storage"]}
    unpack(packed, head["folders"], RUNS, source)
    log = [line for line in client.get_job_logs(job).splitlines() if not line.startswith(MARK)]
    for folder in head["folders"]:
        (RUNS / folder / "job.log").write_text("\n".join(log) + "\n")
        console.print(f"folder: {(RUNS / folder).resolve()}")
        if folder in head["training"]:
            console.print("  still in training: fetch again when it ends to get its wandb files")
    console.print(
        f"fetched {head['files']} files, {head['bytes'] / 2**20:.2f} MiB packed; checkpoints stay in "
        f"{metadata['storage']}"
    )


def read_archive(printed: str) -> tuple[dict[str, Any], bytes]:
    """Returns the header and the bytes that ``launch/jobs/remote_archive.py`` printed. Raises JobError if damaged."""
    lines = printed.splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith(remote_archive.BEGIN)]
    if not begins or remote_archive.END not in lines[begins[-1] :]:
        raise JobError("the archive is incomplete: its end is missing; fetch it again")
    begin = begins[-1]
    head = json.loads(lines[begin].removeprefix(remote_archive.BEGIN))
    try:
        packed = base64.b64decode("".join(lines[begin + 1 : lines.index(remote_archive.END, begin)]), validate=True)
    except binascii.Error:
        packed = b""
    digest = hashlib.sha256(packed).hexdigest()
    if digest != head["sha256"]:
        raise JobError(
            f"the archive is damaged: {len(packed)} of {head['bytes']} bytes, sha256 {digest[:12]} instead of "
            f"{head['sha256'][:12]}; fetch it again"
        )
    return head, packed


def unpack(packed: bytes, folders: list[str], runs: Path, source: dict[str, str]) -> None:
    """Unpacks an archive below ``runs``.

    Raises JobError, before it writes anything, for a path outside ``runs`` and for a folder that exists and was not
    fetched from the same storage, RunFileError for a damaged note of that. In one storage a folder is one run, even if
    several jobs resumed it.
    """
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        try:
            places = [safe_join(runs, folder) for folder in folders]
            files = [safe_join(runs, name) for name in archive.getnames()]
            check_files(archive, runs)
        except PathError as error:
            raise JobError(f"the archive is refused: {error}; nothing was unpacked") from None
        for file in files:
            if not any(file.is_relative_to(place) for place in places):
                raise JobError(f"the archive has {file}, which is not a file of these runs; nothing was unpacked")
        for place in places:
            if place.exists() and not _fetched_from(place / FETCHED, source):
                raise JobError(
                    f"{place} already exists and was not fetched from the storage of this cluster, at "
                    f"{source['address']}; move it away and fetch again"
                )
        for place in places:  # before the files, so that an interrupted fetch can be repeated
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(place / FETCHED, json.dumps(source) + "\n")
        archive.extractall(runs, filter="data")


def _fetched_from(note: Path, source: dict[str, str]) -> bool:
    """Whether a note names the source's storage. One of an older version has only an address, and so has a
    storage that cannot be written."""
    noted = read_json(note) or {}
    known = "storage" if noted.get("storage") and source.get("storage") else "address"
    return noted.get(known) == source[known]
