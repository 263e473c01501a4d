"""Ten thousand harmed files, random bytes flipped in three checkpoints, and SIGKILL at random moments of saves."""

import random
import shutil
from collections import Counter

import pytest
import torch.distributed as dist

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from tests.suite.pipeline.build import join
from tests.suite.training.checkpoint.fuzz import Reader, files_of, fuzz, same
from tests.suite.training.checkpoint.saves import kill_during_saves
from tests.suite.training.work import run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    run_processes(run, 1, 1, 1, 40, str(folder))
    return folder


def flip_bytes(rank, world, rendezvous, folder, work, times, seed):
    """Flips one to five random bytes in a run's checkpoints, ``times`` times, and as often deletes one or two manifests
    as well; returns how often a resume took which step, and how often it refused.

    What must happen is known without the code under test: the newest checkpoint none of whose files changed is taken,
    to the bit; where all changed, the resume is refused and all are named.
    """
    join(rank, world, rendezvous)
    reader, chance, ends = Reader(), random.Random(seed), Counter()
    states = {int(path.name): files_of(path) for path in folder.glob("0*")}
    target = shutil.copytree(folder, work / "flipped")
    files = sorted(path for path in target.glob("0*/*") if path.name != "good")
    for at in range(2 * times):
        before = {path: path.read_bytes() for path in files}
        for path in chance.choices(files, k=chance.randint(1, 5)):
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
            path.write_bytes(bytes(data))
        if at % 2:
            for path in chance.sample(sorted(target.glob("0*/manifest.json")), chance.randint(1, 2)):
                path.unlink()
        harmed = {int(path.parent.name) for path in files if not path.exists() or path.read_bytes() != before[path]}
        whole = max(states.keys() - harmed, default=None)
        if whole is None:
            with pytest.raises(CheckpointError) as refused:
                reader.read(target)
            assert all(f"{step:08d}" in str(refused.value) for step in states), refused.value
        else:
            step, held = reader.read(target)
            assert step == whole, (at, step, whole)
            assert same(held, states[step]), (at, step)
        ends["flipped and deleted" if at % 2 else "flipped", f"step {whole}" if whole else "refused"] += 1
        for path, data in before.items():
            path.write_bytes(data)
    assert same(reader.read(target)[1], states[max(states)])
    dist.destroy_process_group()
    return dict(ends)


def three_checkpoints(work):
    """Returns a folder of the checkpoints of steps 20, 40 and 60 of one run. Retention keeps two; of a run whose steps
    after 20 are all skipped it keeps three."""
    folder = work / "three"
    run_processes(run, 1, 1, 1, 40, str(folder))
    first = shutil.copytree(folder / "00000020", work / "first")
    run_processes(run, 1, 1, 1, 60, str(folder), True)
    return shutil.copytree(first, folder / "00000020").parent


def test_ten_thousand_harmed_files(written, tmp_path):
    (ends,) = run_processes(fuzz, 1, written, tmp_path, 10_000, 3, deadline_s=1500)
    print(ends)
    assert sum(ends.values()) == 10_000
    assert min(ends[end] for end in ("the one before", "refused by name", "of this model")) > 100


def test_two_hundred_times_random_bytes_flipped_in_a_run_of_three_checkpoints(tmp_path):
    (ends,) = run_processes(flip_bytes, 1, three_checkpoints(tmp_path), tmp_path, 200, 7)
    print(sorted(ends.items()))
    assert sum(ends.values()) == 400
    ways = ("step 20", "step 40", "step 60", "refused")
    assert ends.keys() == {(harm, way) for harm in ("flipped", "flipped and deleted") for way in ways}


def test_two_hundred_kills_during_saves_leave_the_state_before_or_the_new_one(tmp_path):
    previous, new = kill_during_saves(str(tmp_path), 200, seed=2)
    assert previous + new == 200
    assert min(previous, new) > 0  # the kills fell before and after the manifest
