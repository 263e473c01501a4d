"""Which files of a user's folder are read, and what their text cannot be."""

import gzip

import pytest

from suite.data.user_files import naming, read_json_lines, text_of, visible_files
from suite.errors import DataError


@pytest.mark.parametrize("target", [".", "..", "sub"])
def test_a_second_way_to_a_folder_is_refused_by_name(tmp_path, target):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(target)
    with pytest.raises(DataError, match="are one folder; remove the link"):
        visible_files(folder)


def test_a_link_to_another_folder_is_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a.txt").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to("../elsewhere")
    assert visible_files(tmp_path / "data") == [tmp_path / "data/link/a.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "x"}\n\n[', "line 3 is not JSON: "),
        (b"[" * 100_000, "line 1 is not JSON: maximum recursion depth exceeded"),
        (b'["text"]', 'line 1 has no text under "text"'),
        (b'{"text": ["x"]}', 'line 1 has a value of type list under "text", not text'),
        (b'{"text": "\\udc00"}', 'line 1 has half of a surrogate pair under "text"'),
        (b'{"text": "x"}\n"\xff"', r"is not UTF-8 \(line 2, byte 15: invalid start byte\)"),
        (b"no archive", "cannot be read: BadGzipFile"),
        (gzip.compress(b'{"text": "x"}', mtime=0)[:-9], "cannot be read: EOFError"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path, content, message):
    is_packed = content.startswith((b"no", b"\x1f"))
    path = tmp_path / ("a.jsonl.gz" if is_packed else "a.jsonl")
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} .*{message}"), naming(path):
        [text_of(row, "text", where) for where, row in read_json_lines(path)]
