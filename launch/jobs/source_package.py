"""The package for the cluster: a zip archive of the checkout's tracked files, as they are in the working tree."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from experiments.custom.own_imports import imported_files
from launch.jobs.client import JobError

MAX_BYTES = 100 * 2**20
"""Largest request that Ray's dashboard accepts (its DASHBOARD_CLIENT_MAX_SIZE)."""

LARGE_BYTES = 10 * 2**20
"""Untracked files of this size or more are named."""

MAX_NAMED = 3
"""Most files to name in a message."""


@dataclass(frozen=True)
class Package:
    """An archive and the lines to print about it."""

    archive: Path
    files: int
    commit: str
    """Empty if there is none yet."""
    lines: tuple[str, ...]


def checkout() -> Path:
    """Returns the folder that this code runs from."""
    return Path(__file__).resolve().parents[2]


OWN = "own"
"""Folder in the archive for a user's file that git does not track."""


def pack(root: Path, archive: Path, limit: int = MAX_BYTES, own: Path | None = None) -> Package:
    """Packs the tracked files of a checkout, and in ``OWN`` the user's file with those of its folder that it imports,
    but no links. Equal files give equal archives, byte for byte.

    Raises JobError outside of a git checkout, for a tracked link to a file that git does not track, and for an archive
    above ``limit`` bytes, naming its largest files.
    """
    tracked = [path for path in _git_paths(root, "ls-files", "-z") if (root / path).is_file()]
    if not tracked:
        raise JobError(
            f"git tracks no file in {root}, and only tracked files are packed: git add the files that a run needs"
        )
    _check_links(root, tracked)
    commit = _git(root, "rev-parse", "--short", "HEAD", fails=True).strip()
    changed = _git_paths(root, "diff", "--name-only", "--relative", "-z", "HEAD") if commit else tracked
    folder = own.parent if own else root
    owned = [path for path in imported_files(own) if not path.is_symlink()] if own else []
    sizes = _write(
        {path: root / path for path in tracked} | {f"{OWN}/{path.relative_to(folder)}": path for path in owned}, archive
    )
    size = archive.stat().st_size
    if size > limit:
        raise JobError(
            f"the package has {_mib(size)}, and Ray accepts at most {_mib(limit)}; its largest files are "
            f"{_largest(sizes)}; keep such files on the cluster's storage instead of in git"
        )
    lines = [f"package: {len(tracked)} tracked files, {_mib(size)}" + (f", commit {commit}" if commit else "")]
    if own:
        lines.append(f"{own} and {len(owned) - 1} files that it imports are packed, too; data beside it is not")
    if changed:
        lines.append(f"{len(changed)} of them have uncommitted changes, which are included: {_first_names(changed)}")
    return Package(archive, len(tracked), commit, (*lines, *_untracked(root)))


def _check_links(root: Path, tracked: list[str]) -> None:
    """Raises JobError if a tracked path leads to a file that git does not track, such as a key in the home folder."""
    real = root.resolve()
    known = {real / path for path in tracked}
    for path in tracked:
        target = (root / path).resolve()
        if target not in known:
            raise JobError(
                f"{path} is a symbolic link to {target}, which git does not track, and a job would get that file; "
                "replace the link by the file, or git rm --cached it"
            )


def is_tracked(root: Path, path: str) -> bool:
    """Whether git tracks a file of a checkout, named by its path from there; a full path is outside of it."""
    return not Path(path).is_absolute() and path in _git_paths(root, "ls-files", "-z", "--", path)


def _untracked(root: Path) -> list[str]:
    """Returns a line about files that git neither tracks nor ignores, if there are any."""
    sizes = {
        path: (root / path).lstat().st_size
        for path in _git_paths(root, "ls-files", "--others", "--exclude-standard", "-z")
    }
    if not sizes:
        return []
    large = {path: size for path, size in sizes.items() if size >= LARGE_BYTES}
    named = f"; large: {_largest(large)}" if large else f": {_first_names(list(sizes))}"
    return [f"not packed, because git does not track them: {len(sizes)} files, {_mib(sum(sizes.values()))}{named}"]


def _write(paths: dict[str, Path], archive: Path) -> dict[str, int]:
    """Writes the archive of files by their name in it; returns the packed size of each."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(paths):
            entry = zipfile.ZipInfo(path)  # with a constant time, so that equal files give equal archives
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (paths[path].stat().st_mode & 0o755) << 16
            file.writestr(entry, paths[path].read_bytes())
        return {entry.filename: entry.compress_size for entry in file.infolist()}


def _git_paths(root: Path, *command: str) -> list[str]:
    return [path for path in _git(root, *command).split("\0") if path]


def _git(root: Path, *command: str, fails: bool = False) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, errors="surrogateescape", timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"cannot run git ({error}), which lists the files to pack") from None
    if done.returncode and not fails:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise JobError(
            f"{root} is not a git checkout ({reason}), and the package holds the files that git tracks: submit from a "
            "clone, or run git init and git add"
        )
    return "" if done.returncode else done.stdout


def _largest(sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda path: -sizes[path])[:MAX_NAMED]
    return ", ".join(f"{path} ({_mib(sizes[path])})" for path in largest)


def _first_names(paths: list[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return ", ".join(sorted(paths)[:MAX_NAMED]) + more


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
