"""Ten thousand harmed files, random bytes flipped in three checkpoints, and every file of a checkpoint harmed in every
plain way."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
from suite.training.checkpoint import audit, newest_valid
from suite.training.checkpoint.storage import Storage
from tests.suite.pipeline.build import join
from tests.suite.training.checkpoint.fuzz import LAYERS, Reader, files_of, fuzz, same
from tests.suite.training.checkpoint.saves import without_save_id
from tests.suite.training.work import run

FILES = [*(f"layer-{layer:04d}.safetensors" for layer in range(LAYERS)), "manifest.json"]


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


def every_harm(rank, world, rendezvous, folder):
    """Returns {(file, harm): (step taken, what was said)}; 64 bits of each file are flipped, one after the other."""
    join(rank, world, rendezvous)
    chance, outcomes = random.Random(4), {}
    for name in FILES:
        (path,) = (path for path in Path(folder, "00000040").iterdir() if without_save_id(path.name) == name)
        data = path.read_bytes()
        harms = {f"bit {bit}": bit for bit in chance.sample(range(8 * len(data)), 64)}
        for kind in (*harms, "cut", "empty", "deleted"):
            if kind == "deleted":
                path.unlink()
            elif kind == "empty":
                path.write_bytes(b"")
            elif kind == "cut":
                path.write_bytes(data[: chance.randrange(len(data))])
            else:
                flipped = bytearray(data)
                flipped[harms[kind] // 8] ^= 1 << harms[kind] % 8
                path.write_bytes(bytes(flipped))
            said = []
            found = newest_valid(folder, range(LAYERS), LAYERS, said.append)
            faults = next(iter(audit(Storage(folder)))).faults
            outcomes[name, kind] = found.step, said, faults
            path.write_bytes(data)
    return outcomes


def test_each_file_with_a_bit_flipped_cut_emptied_or_deleted_is_detected_and_named(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "copy")
    (outcomes,) = run_processes(every_harm, 1, str(folder))
    assert len(outcomes) == len(FILES) * 67
    for (name, kind), (step, said, faults) in outcomes.items():
        assert step == 20, (name, kind)
        assert len(said) == len(faults) == 1, (name, kind, said, faults)
        word = "manifest" if name == "manifest.json" else name
        assert "00000040 is not used" in said[0], said
        assert word in without_save_id(said[0]), (name, kind, said)
        assert word in without_save_id(faults[0]), (name, kind, faults)
