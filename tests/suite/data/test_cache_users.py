"""A cache that several users may write to has locks that all of them can take."""

import stat

import pytest

from suite.data.cache import cached


@pytest.mark.parametrize(("folder", "lock"), [(0o700, 0o600), (0o775, 0o664), (0o1777, 0o666)])
def test_who_may_write_to_the_folder_may_take_the_lock(tmp_path, folder, lock):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(folder)
    cached(cache / "set", lambda building: (building / "a").write_text("a"), print)
    assert stat.S_IMODE((cache / "set.lock").stat().st_mode) == lock
