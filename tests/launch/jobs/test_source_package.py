"""The package of a job, and the packages that it needs."""

import os
import subprocess
import zipfile

import pytest

from experiments.custom.own_imports import ROOT
from launch.jobs.client import JobError
from launch.jobs.requirements import pinned_requirements
from launch.jobs.source_package import pack


def git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """A checkout with three tracked files and an ignored one."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("a = 1\n")
    (root / "sub" / "b.py").write_text("b = 1\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "big.log").write_bytes(b"x" * 100)
    return root


def test_only_tracked_files_are_packed_with_their_uncommitted_changes(tree, tmp_path):
    first, second = [], []
    commit = pack(tree, tmp_path / "one.zip", first.append)
    assert first == [f"package: 3 tracked files, 0.00 MiB, commit {commit}"]
    (tree / "a.py").write_text("a = 2\n")
    (tree / "notes.txt").write_text("untracked")
    (tree / "dump.bin").write_bytes(b"x")
    pack(tree, tmp_path / "two.zip", second.append)
    assert second[1:] == [
        "1 of them have uncommitted changes, which are included: a.py",
        "not packed, because git does not track them: 2 files: dump.bin, notes.txt",
    ]
    with zipfile.ZipFile(tmp_path / "two.zip") as file:
        assert sorted(file.namelist()) == [".gitignore", "a.py", "sub/b.py"]
        assert file.read("a.py") == b"a = 2\n"


def test_the_same_files_make_the_same_archive(tree, tmp_path):
    pack(tree, tmp_path / "one.zip", print)
    os.utime(tree / "a.py", (1, 1))
    pack(tree, tmp_path / "two.zip", print)
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_a_package_over_the_limit_names_its_largest_files(tree, tmp_path):
    (tree / "weights.bin").write_bytes(os.urandom(5000))
    git(tree, "add", "-A")
    with pytest.raises(JobError, match=r"Ray accepts at most 0.00 MiB; its largest files are weights.bin \(0.00 MiB\)"):
        pack(tree, tmp_path / "one.zip", print, limit=4000)


def test_a_folder_without_git_is_rejected_with_advice(tmp_path):
    with pytest.raises(JobError, match=r"is not a git checkout .* submit from a clone, or run git init"):
        pack(tmp_path, tmp_path / "one.zip", print)


def test_only_dependencies_of_a_run_are_pinned():
    pins = pinned_requirements(ROOT)
    assert pins["torch"] == "2.13.0"
    assert "aiohttp" in pins  # a dependency of ray[default], not of plain ray
    assert not {"pytest", "mypy", "ruff"} & set(pins)


def test_a_link_to_a_file_that_git_does_not_track_is_not_packed(tree, tmp_path):
    (tree / "c.py").symlink_to("a.py")
    git(tree, "add", "-A")
    pack(tree, tmp_path / "one.zip", print)
    with zipfile.ZipFile(tmp_path / "one.zip") as file:
        assert file.read("c.py") == b"a = 1\n"
    (tmp_path / "key").write_text("secret")
    for target in (tmp_path / "key", "big.log"):
        (tree / "link").unlink(missing_ok=True)
        (tree / "link").symlink_to(target)
        git(tree, "add", "-A")
        with pytest.raises(JobError, match=r"link is a symbolic link to .*(key|big.log), which git does not track"):
            pack(tree, tmp_path / "two.zip", print)
    assert not (tmp_path / "two.zip").exists()
