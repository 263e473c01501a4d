"""Retention: which checkpoints stay, which are good or best, and what of a person's is left alone."""

import os
import resource
import shutil
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from launch.backends.processes import run_processes
from suite.training.checkpoint import Storage, list_checkpoints, writing
from suite.training.checkpoint.async_save import ManifestJob
from suite.training.checkpoint.ownership import OWNER
from suite.training.checkpoint.retention import KEEP_LATEST, steps_to_keep
from tests.suite.training.checkpoint.saves import Counting, layer_path, limit, restored


def keeps_the_best(rank, world, rendezvous, folder):
    """Returns which checkpoints there are after each save, and which of them are marked; 3 cannot be written."""
    one, seen = Counting(rank, world, rendezvous, folder), []
    for step in range(1, 9):
        limit(300 if step == 3 else resource.RLIM_INFINITY)
        one.save(step, best=step in (1, 2, 3, 7))
        there = sorted(Storage(folder).folders())
        seen.append(" ".join(f"{int(name)}{'*' * Path(folder, name, 'best').exists()}" for name in there))
    return seen, [(each.step, each.best) for each in list_checkpoints(folder, print)], one.failed


def test_the_best_checkpoint_is_kept_until_a_better_one_is_published(tmp_path):
    ((seen, found, failed),) = run_processes(keeps_the_best, 1, str(tmp_path))
    assert failed == [3]
    assert seen == ["1*", "1* 2*", "1* 2*", "2* 4", "2* 4 5", "2* 5 6", "6 7*", "7* 8"]
    assert found == [(8, False), (7, True)]


def resumes_before(rank, world, rendezvous, folder):
    """Saves 1, 2, 3, is taken up at 1 (2 and 3 were damaged, say) and saves 2 anew."""
    one = Counting(rank, world, rendezvous, folder)
    one.save(1, 2, 3)


def again(rank, world, rendezvous, folder):
    one = Counting(rank, world, rendezvous, folder, start=2)
    one.become(3)
    one.saver.finish(3, 0)


def test_a_resume_writes_over_the_future_that_it_gave_up_and_removes_nothing_of_a_persons(tmp_path):
    place, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    place.mkdir()
    (place / "00000009").write_text("a person's file, named as a checkpoint")
    (place / "notes").write_text("a person's")
    run_processes(resumes_before, 1, str(place))
    shutil.copytree(place / "00000002", elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (place / "00000001").symlink_to(elsewhere)
    layer_path(place / "00000003", 0).write_bytes(b"damaged")
    (place / "00000003/good").touch()
    (place / "00000007").mkdir()
    run_processes(again, 1, str(place))
    assert restored(place) == 3
    assert sorted(os.listdir(place)) == ["00000002", "00000003", "00000009", "notes", OWNER]
    assert not (place / "00000003/good").exists()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before, "only the link is removed"


def marks_good(rank, world, rendezvous, folder):
    """Returns the step that each of four saves marks as good; no step between the second and the third is finite."""
    one, marked = Counting(rank, world, rendezvous, folder), []

    def job(notes, good_step, *rest):
        marked.append(good_step)
        return ManifestJob(notes, good_step, *rest)

    writing.ManifestJob = job
    one.save(1, 2)
    one.saver.save(3, 0)
    one.save(4)
    return marked


def test_a_checkpoint_is_good_once_a_finite_step_followed_it(tmp_path):
    assert run_processes(marks_good, 1, str(tmp_path)) == [[None, 1, None, 3]]


@given(st.lists(st.booleans(), max_size=60))
def test_retention_keeps_the_newest_and_never_loses_the_last_good_one(finite):
    """A save at each step; whether a finite step follows it is known before the next one."""
    there: set[int] = set()
    good: set[int] = set()
    for step, follows in enumerate(finite, 1):
        before, there = there, steps_to_keep(there | {step}, good)
        assert there <= before | {step}
        assert set(sorted(before | {step})[-KEEP_LATEST:]) <= there
        assert len(there) <= KEEP_LATEST + 1
        assert not good or max(good) in there
        good |= {step} if follows else set()
