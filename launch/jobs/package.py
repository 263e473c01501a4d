"""The working directory of a job: what git tracks of the checkout, as it is in the working tree. Ray uploads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from experiments.custom.own_imports import imported_files
from launch.jobs.client import JobError
from suite.log import Log

MAX_BYTES = 100 * 2**20
"""Largest request that Ray's dashboard accepts (its DASHBOARD_CLIENT_MAX_SIZE)."""

OWN = "own"
"""Folder for a user's file that git does not track."""


def copy_checkout(root: Path, to: Path, log: Log, own: Path | None = None) -> str:
    """Copies the tracked files of a checkout into the folder ``to``, and into its ``OWN`` the user's file with those of
    its folder that it imports, but no links; logs how large they are. Returns the commit, empty if there is none yet.

    Raises JobError outside of a git checkout, for a tracked link to a file that git does not track, such as a key in
    the home folder, and for more than MAX_BYTES, with the largest files.
    """
    paths = {path: root / path for path in _git_paths(root, "ls-files", "-z") if (root / path).is_file()}
    known, tracked = {file.resolve() for file in paths.values() if not file.is_symlink()}, len(paths)
    for path, file in paths.items():
        if file.resolve() not in known:
            raise JobError(
                f"{path} is a symbolic link to {file.resolve()}, which git does not track, and a job would get that "
                "file; replace the link by the file, or git rm --cached it"
            )
    if own:
        paths |= {
            f"{OWN}/{file.relative_to(own.parent)}": file for file in imported_files(own) if not file.is_symlink()
        }
    sizes = {path: file.stat().st_size for path, file in paths.items()}
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:3]
        raise JobError(
            f"the files that git tracks have {_mib(total)}, and a job takes at most {_mib(MAX_BYTES)}; the largest are "
            f"{', '.join(f'{path} ({_mib(sizes[path])})' for path in largest)}; keep such files on the cluster's "
            "storage instead of in git"
        )
    for path, file in paths.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to / path)
    commit = _git(root, "rev-parse", "--short", "HEAD", may_fail=True).strip()
    log(f"package: {tracked} tracked files, {_mib(total)}" + (f", commit {commit}" if commit else ""))
    if own:
        log(f"{own} and {len(paths) - tracked - 1} files that it imports are packed, too; data beside it is not")
    if changed := _git_paths(root, "diff", "--name-only", "--relative", "-z", "HEAD") if commit else []:
        log(f"{len(changed)} of them have uncommitted changes, which are included: {_first_few(changed)}")
    if untracked := _git_paths(root, "ls-files", "--others", "--exclude-standard", "-z"):
        log(f"not packed, because git does not track them: {len(untracked)} files: {_first_few(untracked)}")
    return commit


def is_tracked(root: Path, path: str) -> bool:
    """Whether git tracks a file of a checkout, named by its path from there; a full path is outside of it."""
    return not Path(path).is_absolute() and path in _git_paths(root, "ls-files", "-z", "--", path)


def _git_paths(root: Path, *command: str) -> list[str]:
    return [path for path in _git(root, *command).split("\0") if path]


def _git(root: Path, *command: str, may_fail: bool = False) -> str:
    words = ["git", "-C", str(root), *command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="surrogateescape", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"cannot run git ({error}), which lists the files to pack") from None
    if done.returncode and not may_fail:
        reason = done.stderr.strip().partition("\n")[0] or "no reason given"
        raise JobError(
            f"{root} is not a git checkout ({reason}), and a job gets the files that git tracks: submit from a clone"
        )
    return "" if done.returncode else done.stdout


def _first_few(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
