"""The facts of a node: versions, devices, memory, folders. Gathered by a process on that node."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.node_probe import installed_versions
from suite.cgroups import cpu_limit, memory_limit_bytes

PACKAGES = ["torch", "ray", "deepspeed", "transformers", "datasets", "wandb", "gpipe-suite"]

SOURCE_FOLDERS = ("suite", "models", "experiments", "launch")

LISTING_S = 20.0
"""Seconds for nvidia-smi: without persistence mode it first loads the driver, some seconds a GPU."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as listed by its driver."""

    name: str
    driver: str


@dataclass(frozen=True)
class Folder:
    """The file system of a folder, in bytes; if the folder does not exist, of its closest parent."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class NodeFacts:
    python: str
    versions: dict[str, str | None]
    """None if a package is not installed."""
    code: str
    """A digest of the suite's source files: two checkouts may have the same version."""
    cores: int
    """Cores that a process started by Ray may use."""
    memory: int
    """Bytes; the container's limit if there is one."""
    gpus: tuple[Gpu, ...]
    usable: int
    """GPUs that torch can use, including those hidden from this process; 0 if none is listed."""
    listing_error: str
    """Why the GPUs could not be listed; empty if they could, or if there is no driver."""
    shared: Folder
    folders: tuple[Folder, ...]


def gather(folders: list[str]) -> NodeFacts:
    """Returns the facts of this machine, with the disk space of ``folders``."""
    gpus, listing_error = list_gpus()
    return NodeFacts(
        python=platform.python_version(),
        versions=installed_versions(PACKAGES),
        code=code_digest(),
        cores=cpu_limit(),
        memory=memory_limit_bytes(),
        gpus=gpus,
        usable=_usable_gpus() if gpus else 0,
        listing_error=listing_error,
        shared=folder("/dev/shm"),
        folders=tuple(folder(path) for path in folders),
    )


def folder(path: str) -> Folder:
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    return Folder(path, usage.total, usage.free)


def code_digest() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCE_FOLDERS for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def list_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Returns the GPUs, and why they could not be listed.

    Queries the driver: Ray hides GPUs from a process that requested none, and torch then sees none.
    """
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=True).stdout
        rows = [line.rpartition(",") for line in output.splitlines() if line.strip()]
        return tuple(Gpu(name.strip(), driver.strip()) for name, _, driver in rows), ""
    except FileNotFoundError:
        return (), ""
    except subprocess.CalledProcessError as error:
        return (), f"nvidia-smi: {(error.stdout + error.stderr).strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi: {error}"


def _usable_gpus() -> int:
    """Returns how many GPUs torch can use in a process from which none is hidden."""
    hidden = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", "import torch; print(torch.cuda.is_available() * torch.cuda.device_count())"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables, check=True).stdout
        return int(output.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0
