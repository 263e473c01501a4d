"""Paths that another machine or an archive named: each is checked before it is joined to a folder of this one."""

from __future__ import annotations

import tarfile
from pathlib import Path

from suite.errors import PathError


def safe_join(root: Path, path: str) -> Path:
    """Returns the file ``path`` below ``root``, symbolic links followed.

    Raises PathError for an absolute path, for ``..``, for the root itself and for a link that leads out of it.
    """
    if "\0" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise PathError(f"{path!r} is no path below {root}")
    base = root.resolve()
    found = (base / path).resolve()
    if found == base or not found.is_relative_to(base):
        raise PathError(f"{path!r} leads out of {root}")
    return found


def extract_files(archive: tarfile.TarFile, root: Path) -> None:
    """Extracts an archive of regular files below ``root``.

    Raises PathError for a path that leaves it and for a link, folder or device, before anything is written.
    """
    members = archive.getmembers()
    for member in members:
        safe_join(root, member.name)
        if not member.isfile():
            raise PathError(f"{member.name!r} in the archive is not a regular file")
    archive.extractall(root, members=members, filter="data")
