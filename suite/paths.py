"""Safe writes, reads and texts: small files are written so that they survive a power cut, and one that is damaged all
the same is named; URLs are shown without their secrets."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

from suite.errors import RunFileError, SettingError

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


def write_atomically(path: Path, content: str | bytes, private: bool = False) -> None:
    """Writes a file so that readers see its old content or all of the new one, also after a power cut; only this user
    can read a ``private`` one. Raises OSError."""
    replace_content(path, content, private)
    sync_folder(path.parent)


def replace_content(path: Path, content: str | bytes, private: bool = False) -> None:
    """Like ``write_atomically``, but a power cut may leave the old content until ``sync_folder`` was called."""
    draft = path.with_name(f"{path.name}.draft-{uuid4().hex}")  # several processes may write the same file
    try:
        draft.touch(0o600 if private else 0o666)
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # otherwise the new name can come to the disk before the content
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_DELETE = "delete it, or restore it from a copy, and run the command again"


def read_json(path: Path, advice: str = _DELETE) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None without the file. Raises RunFileError, with what to do, for a damaged
    one."""
    text = read_text(path, advice)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFileError(f"{path} is damaged: it is not JSON ({error}); {advice}") from None
    if not isinstance(content, dict):
        raise RunFileError(f"{path} is damaged: it has no JSON object; {advice}")
    return content


def read_text(path: Path, advice: str) -> str | None:
    """Returns the text of a file; None without the file. Raises RunFileError, with what to do, for an empty file and
    for one that cannot be read."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path} is damaged: it is not UTF-8 text (byte {error.start}); {advice}") from None
    if not text.strip("\0 \n"):
        raise RunFileError(f"{path} is damaged: it is empty; {advice}")
    return text


def check_socket_folder(folder: str, longest: str) -> None:
    """Raises SettingError when ``longest``, the longest path of a socket in a temporary folder, is too long there."""
    most = 107 - len(longest)  # the longest path of a socket that Linux allows
    if (count := len(os.fsencode(folder))) > most:
        raise SettingError(
            f"the folder of temporary files, {folder}, has a path of {count} bytes, and sockets in it allow {most}; "
            "set TMPDIR to a shorter one, such as TMPDIR=/tmp"
        )
