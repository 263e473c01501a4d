"""The package for the cluster: a zip archive of the checkout's tracked files, as they are in the working tree."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

from experiments.custom.own_imports import imported_files
from launch.jobs.client import JobError
from suite.log import Log

MAX_BYTES = 100 * 2**20
"""Largest request that Ray's dashboard accepts (its DASHBOARD_CLIENT_MAX_SIZE)."""

MAX_NAMED = 3
"""Most names in a message."""

OWN = "own"
"""Folder in the archive for a user's file that git does not track."""


def pack(root: Path, archive: Path, log: Log, limit: int = MAX_BYTES, own: Path | None = None) -> str:
    """Packs the tracked files of a checkout, and in ``OWN`` the user's file with those of its folder that it imports,
    but no links; logs what is in the archive. Equal files give equal archives, byte for byte. Returns the commit, empty
    if there is none yet.

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
    owned = [path for path in imported_files(own) if not path.is_symlink()] if own else []
    paths = {path: root / path for path in tracked}
    paths |= {f"{OWN}/{path.relative_to(own.parent)}": path for path in owned if own}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in sorted(paths):
            entry = zipfile.ZipInfo(name)  # with a constant time, so that equal files give equal archives
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (paths[name].stat().st_mode & 0o755) << 16
            file.writestr(entry, paths[name].read_bytes())
    size = archive.stat().st_size
    if size > limit:
        largest = sorted(file.infolist(), key=lambda entry: -entry.compress_size)
        raise JobError(
            f"the package has {_mib(size)}, and Ray accepts at most {_mib(limit)}; its largest files are "
            f"{first_few([f'{entry.filename} ({_mib(entry.compress_size)})' for entry in largest])}; keep such files "
            "on the cluster's storage instead of in git"
        )
    log(f"package: {len(tracked)} tracked files, {_mib(size)}" + (f", commit {commit}" if commit else ""))
    if own:
        log(f"{own} and {len(owned) - 1} files that it imports are packed, too; data beside it is not")
    if changed:
        log(f"{len(changed)} of them have uncommitted changes, which are included: {first_few(changed)}")
    if untracked := _git_paths(root, "ls-files", "--others", "--exclude-standard", "-z"):
        log(f"not packed, because git does not track them: {len(untracked)} files: {first_few(untracked)}")
    return commit


def first_few(texts: list[str]) -> str:
    """Returns the first texts, and how many more there are."""
    more = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return ", ".join(texts[:MAX_NAMED]) + more


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


def _git_paths(root: Path, *command: str) -> list[str]:
    return [path for path in _git(root, *command).split("\0") if path]


def _git(root: Path, *command: str, fails: bool = False) -> str:
    words = ["git", "-C", str(root), *command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="surrogateescape", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"cannot run git ({error}), which lists the files to pack") from None
    if done.returncode and not fails:
        reason = done.stderr.strip().partition("\n")[0] or "no reason given"
        raise JobError(
            f"{root} is not a git checkout ({reason}), and the package holds the files that git "
            "tracks: submit from a clone, or run git init and git add"
        )
    return "" if done.returncode else done.stdout


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
