"""What a node says of itself: versions, devices, memory, folders. Gathered in a process on that node."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.limits import cores, memory

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "datasets", "wandb", "gpipe-suite")

OURS = ("suite", "models", "experiments", "launch")

LISTING_S = 20.0
"""Seconds that nvidia-smi may take: it wakes the driver where that is not kept awake, some seconds a GPU."""

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its driver lists it; memory in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Folder:
    """The file system below a folder, in bytes; of a folder that is not there, its nearest parent's."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class Facts:
    """One node."""

    host: str
    python: str
    versions: dict[str, str | None]
    """None for a package that is not installed."""
    code: str
    """A digest of the suite's own source files: the version alone does not tell two checkouts apart."""
    cores: int
    """That a process started by Ray may use."""
    memory: int
    """Bytes, of the container where there is a limit."""
    gpus: tuple[Gpu, ...]
    usable: int
    """GPUs that torch can use, whatever is hidden from this process; 0 where none is listed."""
    listing: str
    """Why the GPUs could not be listed; empty where they could, or where there is no driver."""
    shared: Folder
    folders: tuple[Folder, ...]


def gather(folders: list[str]) -> Facts:
    """Returns the facts of the machine this runs on, with the room in ``folders``."""
    gpus, listing = _gpus()
    return Facts(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        code=_code(),
        cores=cores(),
        memory=memory(),
        gpus=gpus,
        usable=_usable() if gpus else 0,
        listing=listing,
        shared=folder(SHARED_MEMORY),
        folders=tuple(folder(path) for path in folders),
    )


def folder(path: str) -> Folder:
    """Returns the room in a folder."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    room = os.statvfs(place)
    return Folder(path, room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _code() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for name in OURS for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """Returns the GPUs, and why there is no list.

    Asked of the driver: Ray hides GPUs from a process that was promised none, and torch then sees none.
    """
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=True).stdout
        rows = [[part.strip() for part in line.rsplit(",", 2)] for line in listed.splitlines() if line.strip()]
        # some devices share the host's memory, and name none of their own
        return tuple(Gpu(name, int(mib) * 2**20 if mib.isdigit() else 0, driver) for name, mib, driver in rows), ""
    except FileNotFoundError:
        return (), ""
    except subprocess.CalledProcessError as error:
        return (), f"nvidia-smi: {(error.stdout + error.stderr).strip()}"
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return (), f"nvidia-smi: {error}"


def _usable() -> int:
    """Returns how many GPUs torch can use, asked in a process from which none is hidden."""
    hidden = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [
        sys.executable,
        "-c",
        "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())",
    ]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=True).stdout
        return int(told.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0
