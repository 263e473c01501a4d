"""A write is whole or not at all."""

import resource
import subprocess
import sys

import pytest

from suite.errors import RunFileError
from suite.paths import hide_secrets, read_json, write_atomically


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("content", ["text é\n", b"\0bytes"])
def test_a_write_replaces_the_file_and_leaves_no_draft(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text("old")
    write_atomically(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert files(tmp_path) == ["a.json"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_draft(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "old"
    assert files(tmp_path) == ["a.json"]


ORDER = """
import os, sys
from pathlib import Path
from suite.paths import write_atomically

calls = []
sys.addaudithook(lambda event, arguments: event == "os.rename" and calls.append(event))
sync = os.fsync
def recorded(file):
    calls.append("fsync " + os.readlink(f"/proc/self/fd/{file}").partition(".draft")[0])
    sync(file)
os.fsync = recorded
write_atomically(Path(sys.argv[1]), "new")
print(*calls, sep="\\n")
"""


def test_a_write_is_on_the_disk_before_its_name_is_and_the_name_at_the_end(tmp_path):
    path = tmp_path / "a.json"
    done = subprocess.run([sys.executable, "-c", ORDER, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"fsync {path}", "os.rename", f"fsync {tmp_path}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "it is empty"), (b"\0\0", "it is empty"), (b'{"a"', "it is not JSON"),
     (b"[" * 9**5, "it is not JSON"), (b"\xff", "it is not UTF-8"),
     (b"[1]", "it has no JSON object")],
)  # fmt: skip
def test_a_damaged_file_is_named_with_its_reason(tmp_path, content, reason):
    path = tmp_path / "a.json"
    assert read_json(path) is None
    path.write_bytes(b'{"a": 1}\n')
    assert read_json(path) == {"a": 1}
    path.write_bytes(content)
    with pytest.raises(RunFileError, match=rf"a\.json is damaged: {reason}.*; delete it, or restore it"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sftp://me:pa@ss@host:22/runs", "sftp://***@host:22/runs"),
        ("sftp://me:pa/s?s#word@host/runs", "sftp://***@host/runs"),
        ("https://h:443/c?sig=a%2Bb@c:d", "https://h:443/c?***"),
        ("cannot write to az://c/x?sig=abc (403)", "cannot write to az://c/x?*** (403)"),
        ('{"a": "sftp://u:p@h/x", "b": "http://h/?k=v"}', '{"a": "sftp://***@h/x", "b": "http://h/?***"}'),
        ("user@host /a/folder?x", "user@host /a/folder?x"),
        ("s3://bucket/runs/a@b:c and http://head:8265/x@y", "s3://bucket/runs/a@b:c and http://head:8265/x@y"),
    ],
)
def test_urls_are_shown_without_secrets(text, shown):
    assert hide_secrets(text) == shown
