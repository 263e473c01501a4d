"""Safe paths and writes: paths from other machines and archives are checked, files are written atomically, and URLs
are shown without their secrets."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from uuid import uuid4

from suite.errors import PathError

_URL = re.compile(
    r"""(?<![\w+.-])([A-Za-z][A-Za-z0-9+.-]*://)"""
    r"""([^\s/?#"'<>]*@|[^\s/:@"'<>]*:(?!\d*(?:[/?#\s"'<>]|$))[^\s@"'<>]*@)?"""  # the second: a password with / or ?
    r"""([^\s?#"'<>]*)([?#][^\s"'<>]*)?"""
)


def hide_secrets(text: str) -> str:
    """Returns a text with ``***`` for the user and password and for the query of each URL in it, for everything that
    people read. A run itself needs the URL as it was given."""

    def shown(url: re.Match[str]) -> str:
        return url[1] + ("***@" if url[2] else "") + url[3] + ("?***" if url[4] else "")

    return _URL.sub(shown, text)


def safe_join(root: Path, path: str) -> Path:
    """Returns the file ``path`` below ``root``, with symbolic links resolved.

    Raises PathError for an absolute path, for ``..``, for the root itself and for a link that points outside it.
    """
    if "\0" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise PathError(f"{path!r} is not a path below {root}")
    base = root.resolve()
    target = (base / path).resolve()
    if target == base or not target.is_relative_to(base):
        raise PathError(f"{path!r} leaves {root}")
    return target


def extract_files(archive: tarfile.TarFile, root: Path) -> None:
    """Extracts an archive of regular files below ``root``.

    Raises PathError, before it writes anything, for a path outside ``root`` and for a link, folder or device.
    """
    members = archive.getmembers()
    for member in members:
        safe_join(root, member.name)
        if not member.isfile():
            raise PathError(f"{member.name!r} in the archive is not a regular file")
    archive.extractall(root, members=members, filter="data")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that readers see its old content or all of the new one. Raises OSError."""
    draft = path.with_name(f"{path.name}.draft-{uuid4().hex}")  # several processes may write the same file
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
