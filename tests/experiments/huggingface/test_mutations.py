"""Folders changed at random: each loads as in transformers, is trained and written back, or is refused with its file.

``python -m tests.experiments.huggingface.test_mutations 0 2400`` tries more seeds and counts the outcomes.
"""

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.experiments.huggingface.mutations import mutate, save_folders
from tests.experiments.huggingface.outcomes import outcome

SEEDS = 60


def tried(folders, seed, place):
    """Returns what was changed, and the outcome."""
    folder = place / "folder"
    shutil.copytree(folders[seed % len(folders)], folder)
    return mutate(folder, seed), *outcome(folder, place / "out")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.filterwarnings("ignore:.*has no place for")
@pytest.mark.parametrize("seed", [*range(SEEDS), 2385])
def test_a_changed_folder_is_loaded_or_refused(folders, seed, tmp_path):
    done, kind, said = tried(folders, seed, tmp_path)
    assert kind in ("works", "works, transformers does not", "refused"), (done, kind, said)


def count(first, last):
    """Prints each outcome that is not allowed, and the number of each kind."""
    counts = Counter()
    with tempfile.TemporaryDirectory() as root:
        folders = save_folders(Path(root) / "folders")
        for seed in range(first, last):
            done, kind, said = tried(folders, seed, Path(root) / str(seed))
            shutil.rmtree(Path(root) / str(seed))
            counts[kind] += 1
            if kind not in ("works", "refused"):
                print(seed, done, kind, said)
    for kind, number in sorted(counts.items()):
        print(number, kind)


if __name__ == "__main__":
    count(*map(int, sys.argv[1:]))
