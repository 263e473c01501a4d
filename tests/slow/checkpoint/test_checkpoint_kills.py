"""SIGKILL at random moments of real saves: what is restored is the state before the save under way, or the new one."""

from tests.suite.training.checkpoint.saves import kill_during_saves


def test_two_hundred_kills_during_saves(tmp_path):
    previous, new = kill_during_saves(str(tmp_path), 200, seed=2)
    print(f"200 kills: {previous} times the state before, {new} times the new one")
    assert previous + new == 200
    assert min(previous, new) > 0  # the kills fell before and after the manifest
