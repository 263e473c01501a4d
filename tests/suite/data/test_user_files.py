"""Which files of a user's folder are read."""

import pytest

from suite.data.user_files import visible_files
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
