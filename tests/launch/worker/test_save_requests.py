"""When a worker asks for a checkpoint or for the end."""

from launch.worker import save_requests
from launch.worker.save_requests import END_FILE, SaveRequests
from suite.training.loop import Ask


def test_a_checkpoint_is_due_by_the_clock_and_the_end_once_there_is_a_file(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(save_requests.time, "monotonic", lambda: now[0])
    one, other = SaveRequests(tmp_path, 2.0), SaveRequests(None, None)
    asked = []
    for now[0] in (0.0, 119.0, 120.0, 121.0, 239.0, 1000.0, 1001.0, -500.0):  # the last: of another clock
        asked.append(one())
        assert other() is Ask.NOTHING
    assert [at for at, ask in enumerate(asked) if ask is Ask.SAVE] == [2, 5]
    (tmp_path / END_FILE).touch()
    assert one() is Ask.END
