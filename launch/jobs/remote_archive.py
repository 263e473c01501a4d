"""Runs on the cluster's head: packs what a job's runs left behind, checkpoints aside, and prints it. Imports nothing of
ours; a job's log is the one way out of a cluster that every cluster has."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import io
import json
import os
import sys
import tarfile
from typing import Any, NoReturn

LEFT_OUT = {"checkpoints", "ray-train", "heartbeats", "lock", ".shared"}
"""Folders and files of a run that stay where they are."""

WEIGHTS = (".safetensors", ".bin", ".pt")
LOCK = ".lock"

BEGIN, END = "@gpipe-archive ", "@gpipe-end"
WIDTH = 4096


def list_files(folder: str) -> list[str]:
    """Returns the files to be packed, below one run's folder."""
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        found += [os.path.join(place, name) for name in sorted(names)
                  if name not in LEFT_OUT and not name.endswith((*WEIGHTS, LOCK))]  # fmt: skip
    return [path for path in found if os.path.isfile(path) and not os.path.islink(path)]


def in_training(folder: str) -> bool:
    """Returns whether a process holds a run's lock."""
    try:
        with open(os.path.join(folder, "lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has none
        return False
    return False


def mib(size: int) -> str:
    """Returns a size as it is printed."""
    return f"{size / 2**20:.1f} MiB"


def fail(sentence: str) -> NoReturn:
    """Ends with a sentence."""
    print(sentence, flush=True)
    sys.exit(1)


def main(asked: dict[str, Any]) -> None:
    """Packs the folders that a job noted, and those named beside them."""
    runs = os.path.realpath(os.path.join(asked["storage"], "runs"))
    notes = os.path.join(asked["storage"], "jobs", asked["job"])
    folders: list[str] = []
    if os.path.exists(notes):
        with open(notes) as file:
            folders = file.read().split("\n")
    folders += [os.path.join(runs, name) for name in asked["beside"]]
    folders = [os.path.realpath(folder) for folder in folders if folder and os.path.isdir(folder)]
    folders = list(dict.fromkeys(folders))
    if not folders:
        fail("it has made no run yet: no folder is noted in " + notes)
    for folder in folders:
        if not folder.startswith(runs + os.sep):
            fail(f"the run's folder {folder} lies outside of {runs}; copy it from there")
    training = [folder for folder in folders if in_training(folder)]
    unfinished = tuple(os.path.join(folder, "wandb", "") for folder in training)
    files = list(dict.fromkeys(path for folder in folders for path in list_files(folder)))
    files = [path for path in files if not path.startswith(unfinished)]
    raw = sum(os.path.getsize(path) for path in files)
    buffer = io.BytesIO()
    if raw <= 20 * asked["limit"]:  # no more than that can be packed into it
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path in files:
                archive.add(path, os.path.relpath(path, runs), recursive=False)
    packed = buffer.getvalue()
    if not packed or len(packed) > asked["limit"]:
        largest = sorted(files, key=os.path.getsize, reverse=True)[:3]
        named = ", ".join(f"{path} ({mib(os.path.getsize(path))})" for path in largest)
        size = mib(raw) + (f", packed {mib(len(packed))}" if packed else "")
        fail(
            f"its files have {size}, and {mib(asked['limit'])} packed at most go through a job's log; copy "
            f"{' '.join(folders)} from the storage itself, the largest are {named}"
        )
    head = {
        "sha256": hashlib.sha256(packed).hexdigest(), "bytes": len(packed), "files": len(files),
        "folders": [os.path.relpath(folder, runs) for folder in folders],
        "training": [os.path.relpath(folder, runs) for folder in training],
    }  # fmt: skip
    print(BEGIN + json.dumps(head))
    text = base64.b64encode(packed).decode()
    for at in range(0, len(text), WIDTH):
        print(text[at : at + WIDTH])
    print(END, flush=True)


if __name__ == "__main__":
    main(json.loads(os.environ["GPIPE_PACK"]))
