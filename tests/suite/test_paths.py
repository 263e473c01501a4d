"""Paths from another node or an archive stay below the folder they are joined to; a write is whole or not at all."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.storage_sync.folder_delta import FileDelta, apply_delta
from suite.errors import PathError
from suite.paths import extract_files, hide_secrets, safe_join, write_atomically

BAD = ["../out", "{}/out", "a/../../out", "a/../b", "..", ".", "", "link/out", "link", "a\0b", "../root-other/x"]


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "root-other").mkdir()
    (folder / "link").symlink_to(tmp_path / "root-other")
    return folder


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_path_below_is_joined_also_where_the_root_is_behind_a_link(root, tmp_path):
    assert safe_join(root, "a/b.txt") == root.resolve() / "a/b.txt"
    (tmp_path / "door").symlink_to(root)
    assert safe_join(tmp_path / "door", "a") == root.resolve() / "a"


@pytest.mark.parametrize("path", BAD)
def test_a_path_that_leaves_the_root_is_refused_and_nothing_is_written(root, tmp_path, path):
    path = path.replace("{}", str(tmp_path))
    with pytest.raises(PathError):
        safe_join(root, path)
    with pytest.raises(PathError):
        apply_delta(root, FileDelta(path, 0, b"data", True))
    assert files(tmp_path) == []


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b", "/", "link"]), max_size=6).map("/".join))
def test_what_is_joined_is_always_below_the_root(tmp_path_factory, path):
    root = tmp_path_factory.mktemp("root")
    (root / "link").symlink_to("/tmp")
    try:
        found = safe_join(root, path)
    except PathError:
        return
    assert root.resolve() in found.parents


def archive(*members):
    """Returns a tar of a good file and of these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in (tarfile.TarInfo("good"), *members):
            tar.addfile(member, io.BytesIO())
    return buffer.getvalue()


def link(kind):
    member = tarfile.TarInfo("inner")
    member.type, member.linkname = kind, "good"
    return member


@pytest.mark.parametrize(
    "member", [*map(tarfile.TarInfo, ["../out", "a/../../out", "link/out"]), link(tarfile.SYMTYPE),
               link(tarfile.LNKTYPE), link(tarfile.FIFOTYPE)],
)  # fmt: skip
def test_an_archive_with_one_bad_member_writes_nothing(root, tmp_path, member):
    with tarfile.open(fileobj=io.BytesIO(archive(member))) as tar, pytest.raises(PathError):
        extract_files(tar, root)
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", ["text é\n", b"\0bytes"])
def test_a_write_replaces_the_file_and_leaves_no_draft(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_atomically(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert files(tmp_path) == ["a.json"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(draft, data):
        draft.open("wb").close()
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert files(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:pass@host/runs", "sftp://***@host/runs"),
        ("sftp://me:pa@ss@host:22/runs", "sftp://***@host:22/runs"),
        ("sftp://me:pa/s?s#word@host/runs", "sftp://***@host/runs"),
        ("https://h:443/c?sig=a%2Bb@c:d", "https://h:443/c?***"),
        ("https://h?sig=a@b", "https://h?***"),
        ("cannot write to az://c/x?sig=abc (403)", "cannot write to az://c/x?*** (403)"),
        ('{"a": "sftp://u:p@h/x", "b": "http://h/?k=v"}', '{"a": "sftp://***@h/x", "b": "http://h/?***"}'),
        ("user@host", "user@host"),
        ("/a/folder?x", "/a/folder?x"),
        ("s3://bucket/runs/a@b:c and http://head:8265/x@y", "s3://bucket/runs/a@b:c and http://head:8265/x@y"),
    ],
)
def test_urls_are_shown_without_secrets(text, shown):
    assert hide_secrets(text) == shown
