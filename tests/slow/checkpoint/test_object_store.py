"""Checkpoints and whole runs at s3:// addresses, on moto's S3 server on this machine."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from suite.errors import CheckpointError
from suite.training.checkpoint import Storage
from tests.slow.running import Running
from tests.suite.training.checkpoint.saves import restored
from tests.suite.training.checkpoint.test_saving import check_store

MOTO = "moto[server]==5.2.5"
BUCKET = "s3://bucket"
AWS = {
    "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


def moto_server():
    """Returns moto's server, installed into an environment of its own: botocore takes no python-dateutil as new as the
    pinned one."""
    folder = Path(__file__).parents[3] / ".cache" / "moto-5.2.5"
    program = folder / "bin" / "moto_server"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", MOTO]
        if subprocess.run(pip, timeout=900, check=False).returncode:
            pytest.skip(f"pip cannot install {MOTO}")
    return program


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    """Sets the environment of this process to a server of an empty bucket; yields its address."""
    process = Running(tmp_path_factory.mktemp("moto"), [moto_server(), "-H", "127.0.0.1", "-p", "0"])
    try:
        address = process.until(lambda: re.search(r"http://127\.0\.0\.1:\d+", process.printed), 60).group()
        requests.put(f"{address}/bucket", timeout=10).raise_for_status()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (AWS | {"AWS_ENDPOINT_URL": address}).items():
                patch.setenv(name, value)
            yield address
    finally:
        process.end()


def test_checkpoints_are_written_rotated_and_read():
    check_store(f"{BUCKET}/rotated")


def test_a_damaged_layer_is_named_and_a_checkpoint_is_removed():
    place = f"{BUCKET}/damaged"
    check_store(place)
    storage = Storage(place)
    layer = next(f"00000003/{name}" for name in storage.names("00000003") if name.startswith("layer-0001."))
    data = storage.read(layer, storage.size(layer))
    storage.write(layer, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=layer):
        restored(place)
    storage.remove_folder("00000003")
    assert storage.folders() == ["00000002"]
    assert restored(place) == 2


def test_large_files_and_parts_of_them_come_as_they_went():
    storage, data = Storage(f"{BUCKET}/large"), os.urandom(40_000_000)  # several parts
    storage.write("1/weights", data)
    assert storage.size("1/weights") == len(data)
    assert storage.read("1/weights", len(data) + 1) == data
    assert storage.read("1/weights", 100) == data[:100]
    assert storage.names("1") == {"weights"}
    storage.remove("1/weights")
    storage.remove("1/weights")
    assert storage.names("nothing") == set()
    with pytest.raises(FileNotFoundError):
        storage.size("1/weights")


def test_a_store_that_is_silent_or_away_is_an_error_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(OSError, match=rf"{BUCKET}/x/a: .*NETWORK_CONNECTION"):
            Storage(f"{BUCKET}/x").write("a", b"1")
        assert time.monotonic() - begin < 60
    with pytest.raises(OSError, match=rf"{BUCKET}/x/a: .*NETWORK_CONNECTION"):
        Storage(f"{BUCKET}/x").write("a", b"1")


def test_a_bucket_that_is_not_there_is_named(server):
    with pytest.raises(OSError, match="nobucket"):
        Storage("s3://nobucket/x").write("a", b"1")
    assert requests.get(f"{server}/nobucket", timeout=10).status_code == 404
