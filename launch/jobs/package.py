"""What goes to the cluster: the tracked files of the checkout, as they are in the working tree, in one zip archive."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.door import JobError

LIMIT = 100 * 2**20
"""Bytes: the most that Ray's dashboard takes in one request (its DASHBOARD_CLIENT_MAX_SIZE)."""

LARGE = 10 * 2**20
"""Bytes from which a file that is left behind is named."""

TOLD = 3
"""Files that are named at most."""


@dataclass(frozen=True)
class Package:
    """An archive, and what is to be said of it."""

    archive: Path
    files: int
    commit: str
    """Empty where there is none yet."""
    lines: tuple[str, ...]


def checkout() -> Path:
    """Returns the folder that this code runs from."""
    return Path(__file__).resolve().parents[2]


def pack(root: Path, archive: Path, limit: int = LIMIT) -> Package:
    """Packs the tracked files of a checkout. The same files make the same archive, byte for byte.

    Raises JobError outside of a git checkout, and for an archive over the limit, with its largest files.
    """
    tracked = [path for path in _listed(root, "ls-files", "-z") if (root / path).is_file()]
    if not tracked:
        raise JobError(f"git tracks no file below {root}, and only tracked files are packed: git add what a run needs")
    commit = _git(root, "rev-parse", "--short", "HEAD", fails=True).strip()
    changed = _listed(root, "diff", "--name-only", "--relative", "-z", "HEAD") if commit else tracked
    sizes = _write(root, tracked, archive)
    size = archive.stat().st_size
    if size > limit:
        raise JobError(
            f"the package has {_mib(size)}, and Ray takes {_mib(limit)} at most; its largest files are "
            f"{_named(sizes)}: keep such files out of git, on the cluster's storage"
        )
    lines = [f"package: {len(tracked)} tracked files, {_mib(size)}" + (f", commit {commit}" if commit else "")]
    if changed:
        lines.append(f"{len(changed)} of them differ from the commit and go as they are: {_some(changed)}")
    return Package(archive, len(tracked), commit, (*lines, *_left_behind(root)))


def _left_behind(root: Path) -> list[str]:
    """Returns what there is to say of files that git does not know, and that it was not told to ignore."""
    sizes = {
        path: (root / path).lstat().st_size
        for path in _listed(root, "ls-files", "--others", "--exclude-standard", "-z")
    }
    if not sizes:
        return []
    large = {path: size for path, size in sizes.items() if size >= LARGE}
    named = f"; large: {_named(large)}" if large else f": {_some(list(sizes))}"
    return [f"left behind, as git does not track them: {len(sizes)} files, {_mib(sum(sizes.values()))}{named}"]


def _write(root: Path, paths: list[str], archive: Path) -> dict[str, int]:
    """Writes the archive and returns the packed size of each file."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(paths):
            entry = zipfile.ZipInfo(path)  # its time is that of no day, so that the same files make the same archive
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = ((root / path).stat().st_mode & 0o755) << 16
            file.writestr(entry, (root / path).read_bytes())
        return {entry.filename: entry.compress_size for entry in file.infolist()}


def _listed(root: Path, *command: str) -> list[str]:
    return [path for path in _git(root, *command).split("\0") if path]


def _git(root: Path, *command: str, fails: bool = False) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, errors="surrogateescape", timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"git cannot be run ({error}), and a package is made of the files that git tracks") from None
    if done.returncode and not fails:
        said = (done.stderr.strip().splitlines() or ["no word"])[0]
        raise JobError(
            f"{root} is no git checkout ({said}), and a package is made of the files that git tracks: submit from a "
            "clone, or make it one by git init and git add"
        )
    return "" if done.returncode else done.stdout


def _named(sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:TOLD]
    return ", ".join(f"{path} ({_mib(sizes[path])})" for path in largest)


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - TOLD} more" if len(paths) > TOLD else ""
    return ", ".join(sorted(paths)[:TOLD]) + more


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
