"""Runs on the cluster's head: packs the files of a job's runs, without checkpoints, and prints the archive, because the
job's log is the one way out of every cluster. It imports nothing of this project.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import json
import os
import sys
import tarfile
import uuid
from contextlib import suppress
from typing import Any

EXCLUDED = {"checkpoints", "ray-train", "heartbeats.json", "lock", ".shared", "fetched.json"}
"""Folders and files of a run that are not packed."""

EXCLUDED_SUFFIXES = (".safetensors", ".bin", ".pt", ".lock")

BEGIN, END = "@gpipe-archive ", "@gpipe-end"
WIDTH = 4096


def list_files(folder: str) -> list[str]:
    """Returns the files to pack of one run's folder."""
    files: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in EXCLUDED)
        packed = (name for name in sorted(names) if name not in EXCLUDED and not name.endswith(EXCLUDED_SUFFIXES))
        files += [os.path.join(parent, name) for name in packed]
    return [path for path in files if os.path.isfile(path) and not os.path.islink(path)]


def in_training(folder: str) -> bool:
    """Returns whether a process holds a run's lock."""
    try:
        with open(os.path.join(folder, "lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has no lock file
        return False
    return False


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def find_folders(runs: str, request: dict[str, Any]) -> list[str]:
    """Returns the run folders that a job noted, and the extra ones that were requested. Exits if there are none."""
    notes = os.path.join(request["storage"], "jobs", request["job"])
    folders: list[str] = []
    if os.path.exists(notes):
        with open(notes) as file:
            folders = file.read().split("\n")
    folders += [os.path.join(runs, name) for name in request["extra_folders"]]
    folders = list(dict.fromkeys(os.path.realpath(folder) for folder in folders if folder and os.path.isdir(folder)))
    if not folders:
        sys.exit(f"it has made no run yet: no folder is noted in {notes}")
    for folder in folders:
        if not folder.startswith(runs + os.sep):
            sys.exit(f"the run's folder {folder} lies outside of {runs}; copy it from there")
    return folders


def storage_id(storage: str) -> str:
    """Returns the id of a storage, which its first fetch writes. An address, as of a tunnel, may lead to another
    cluster tomorrow. Returns an empty text where that cannot be written."""
    path = os.path.join(storage, ".id")
    try:
        if not os.path.exists(path):
            draft = f"{path}.{uuid.uuid4().hex}"
            with open(draft, "x") as file:
                file.write(uuid.uuid4().hex)
            with suppress(FileExistsError):  # another fetch was first
                os.link(draft, path)
            os.remove(draft)
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def main(request: dict[str, Any]) -> None:
    """Packs the folders of a job. Exits with a sentence if that is not possible."""
    runs, limit = os.path.realpath(os.path.join(request["storage"], "runs")), request["limit"]
    folders = find_folders(runs, request)
    training = [folder for folder in folders if in_training(folder)]
    unfinished = tuple(os.path.join(folder, "wandb", "") for folder in training)
    files = list(dict.fromkeys(path for folder in folders for path in list_files(folder)))
    files = [path for path in files if not path.startswith(unfinished)]
    raw_bytes = sum(os.path.getsize(path) for path in files)
    buffer = io.BytesIO()
    if raw_bytes <= 20 * limit:  # more cannot be packed into it
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path in files:
                archive.add(path, os.path.relpath(path, runs), recursive=False)
    packed = buffer.getvalue()
    if not packed or len(packed) > limit:
        largest = sorted(files, key=os.path.getsize, reverse=True)[:3]
        named = ", ".join(f"{path} ({mib(os.path.getsize(path))})" for path in largest)
        size = mib(raw_bytes) + (f", packed {mib(len(packed))}" if packed else "")
        sys.exit(
            f"its files have {size}, and {mib(limit)} packed at most go through a job's log; copy "
            f"{' '.join(folders)} from the storage itself, the largest are {named}"
        )
    head = {
        "sha256": hashlib.sha256(packed).hexdigest(),
        "bytes": len(packed),
        "files": len(files),
        "folders": [os.path.relpath(folder, runs) for folder in folders],
        "training": [os.path.relpath(folder, runs) for folder in training],
        "storage": storage_id(request["storage"]),
    }
    print(BEGIN + json.dumps(head))
    text = base64.b64encode(packed).decode()
    for at in range(0, len(text), WIDTH):
        print(text[at : at + WIDTH])
    print(END, flush=True)


if __name__ == "__main__":
    main(json.loads(os.environ["GPIPE_REQUEST"]))
