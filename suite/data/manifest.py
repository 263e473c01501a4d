"""The manifest of a prepared folder: every file's size and SHA-256. Written last, it marks the folder complete."""

from __future__ import annotations

import json
from hashlib import file_digest
from pathlib import Path

MANIFEST = "manifest.json"


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    files.pop(MANIFEST, None)
    return files


def write_manifest(folder: Path) -> None:
    """Lists every file below ``folder`` in its manifest. Call it when all files are written."""
    files = {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in _files(folder).items()}
    (folder / MANIFEST).write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1))


def damage(folder: Path) -> str | None:
    """Describes what is wrong with the folder; None when every file is intact."""
    try:
        listed = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    files = _files(folder)
    for name, (size, digest) in expected.items():
        if name not in files:
            return f"{name} is missing"
        if files[name].stat().st_size != size:
            return f"{name} has {files[name].stat().st_size} bytes instead of {size}"
        if _digest(files[name]) != digest:
            return f"{name} does not have the SHA-256 it was written with"
    surplus = sorted(set(files) - set(expected))
    return f"{surplus[0]} is not in {MANIFEST}" if surplus else None
