"""The working directory of a job."""

import subprocess

import pytest

from launch.jobs.client import JobError
from launch.jobs.package import MAX_BYTES, copy_checkout


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


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_tracked_files_are_packed_with_their_uncommitted_changes(tree, tmp_path):
    first, second = [], []
    commit = copy_checkout(tree, tmp_path / "one", first.append)
    assert first == [f"package: 3 tracked files, 0.00 MiB, commit {commit}"]
    (tree / "a.py").write_text("a = 2\n")
    (tree / "notes.txt").write_text("untracked")
    (tree / "dump.bin").write_bytes(b"x")
    copy_checkout(tree, tmp_path / "two", second.append)
    assert second[1:] == [
        "1 of them have uncommitted changes, which are included: a.py",
        "not packed, because git does not track them: 2 files: dump.bin, notes.txt",
    ]
    assert names(tmp_path / "two") == [".gitignore", "a.py", "sub/b.py"]
    assert (tmp_path / "two" / "a.py").read_text() == "a = 2\n"


def test_a_checkout_of_two_gigabytes_is_refused_with_its_largest_files(tree, tmp_path):
    with (tree / "weights.bin").open("wb") as file:
        file.truncate(2 * 2**30)
    copy_checkout(tree, tmp_path / "one", print)  # git does not track it
    git(tree, "add", "-N", "weights.bin")
    limit = f"{MAX_BYTES / 2**20:.2f} MiB"
    with pytest.raises(JobError, match=rf"have 2048.00 MiB, .* at most {limit}; .* weights.bin \(2048.00 MiB\)"):
        copy_checkout(tree, tmp_path / "two", print)
    assert not (tmp_path / "two").exists()


def test_a_folder_without_git_is_rejected_with_advice(tmp_path):
    with pytest.raises(JobError, match=r"is not a git checkout .*: submit from a clone"):
        copy_checkout(tmp_path, tmp_path / "one", print)


def test_a_link_to_a_file_that_git_does_not_track_is_not_packed(tree, tmp_path):
    (tree / "c.py").symlink_to("a.py")
    git(tree, "add", "-A")
    copy_checkout(tree, tmp_path / "one", print)
    assert (tmp_path / "one" / "c.py").read_text() == "a = 1\n"
    (tmp_path / "key").write_text("secret")
    for target in (tmp_path / "key", "big.log"):
        (tree / "link").unlink(missing_ok=True)
        (tree / "link").symlink_to(target)
        git(tree, "add", "-A")
        with pytest.raises(JobError, match=r"link is a symbolic link to .*(key|big.log), which git does not track"):
            copy_checkout(tree, tmp_path / "two", print)
    assert not (tmp_path / "two").exists()
