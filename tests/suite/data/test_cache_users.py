"""A cache that several users and runs may write to."""

import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from suite.data.cache import cached, find_damage


@pytest.mark.parametrize(("folder", "lock"), [(0o700, 0o600), (0o775, 0o664), (0o1777, 0o666)])
def test_who_may_write_to_the_folder_may_take_the_lock(tmp_path, folder, lock):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(folder)
    cached(cache / "set", lambda building: (building / "a").write_text("a"), print)
    assert stat.S_IMODE((cache / "set.lock").stat().st_mode) == lock


def test_two_that_want_the_same_data_prepare_it_once(tmp_path):
    """The second waits for the first, and takes what it has made."""
    built, begun = [], threading.Event()

    def build(building):
        built.append(building)
        begun.set()
        time.sleep(0.3)
        (building / "a").write_text("a")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached, tmp_path / "set", build, print)
        assert begun.wait(60)
        second = pool.submit(cached, tmp_path / "set", build, print)
        first.result(60), second.result(60)
    assert len(built) == 1
    assert (tmp_path / "set/a").read_text() == "a"
    assert find_damage(tmp_path / "set") is None
