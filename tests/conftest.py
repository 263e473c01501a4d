"""Offline switches for every test, before anything that reads them is imported."""

import gc
import os
import sys
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true",
    RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu",
    CUDA_VISIBLE_DEVICES="",
)  # fmt: skip

import hypothesis
import pytest

from launch.backends import processes

# a worker that runs a function of a test file imports what that file does
processes.PRELOAD += ["hypothesis", "pytest"]

COLLECTS_AS_USUAL = gc.get_threshold()
gc.set_threshold(*COLLECTS_AS_USUAL[:2], 100)  # full garbage collections were a third of the collection of tests

# a machine that is busy with other work is no fault of an example
hypothesis.settings.register_profile("any-speed", deadline=None)
hypothesis.settings.load_profile("any-speed")

LONG = (
    "launch/train/test_end_to_end.py", "lane/test_lane.py", "suite/pipeline/runtime/test_gradients.py",
    "launch/test_cli.py", "experiments/planning/test_planner.py", "experiments/sweeps/report/test_verdicts.py",
    "experiments/base/test_workload.py", "launch/train/test_image_run.py", "launch/supervision/test_supervisor.py",
    "suite/training/test_training.py", "suite/pipeline/model/test_batchnorm.py", "launch/worker/test_feed_processes.py",
    "experiments/planning/test_suggestions.py", "experiments/scaling/test_scales.py",
    "experiments/custom/test_models.py", "launch/inference/test_score.py", "suite/training/test_fingerprints.py",
)  # fmt: skip
"""The files that take longest, longest first."""

TESTS = Path(__file__).parent


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder of prepared data of all test processes: each text is prepared once for all of them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "prepared"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def _own_imports():
    """Users' files are imported from folders of tests: neither they nor their folders are found after it."""
    path, last = [*sys.path], next(reversed(sys.modules))
    yield
    sys.path[:] = path
    for name in [*takewhile(lambda name: name != last, [*reversed(sys.modules)])]:
        if "/pytest-of-" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def _own_imports_of_module():
    with _own_imports():
        yield


@pytest.fixture(autouse=True)
def _own_imports_of_test():
    with _own_imports():
        yield


def pytest_collection_finish():
    """Each full garbage collection of a test would search all imported modules again."""
    gc.freeze()
    gc.set_threshold(*COLLECTS_AS_USUAL)


def pytest_collection_modifyitems(items):
    """Long files come first: one that began last would keep one process busy and leave the other idle."""
    rank = {TESTS / name: at for at, name in enumerate(LONG)}
    assert all(path.exists() for path in rank), "LONG in tests/conftest.py names a file that was moved"
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))
