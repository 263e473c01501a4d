"""A worker's log: it is rotated while processes append to it."""

from launch.worker import log_file
from launch.worker.log_file import rotate


def test_a_large_log_is_rotated_and_its_writer_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "MAX_BYTES", 100)
    log = tmp_path / "stage-0-0.log"
    with log.open("a") as file:
        for number in range(30):
            file.write(f"line {number}\n")
            file.flush()
            rotate(log)
            assert log.stat().st_size <= 110
    kept = (tmp_path / "stage-0-0.log.1").read_text() + log.read_text()
    assert kept.splitlines() == [f"line {number}" for number in range(14, 30)]
