"""Real checkpoints of a small run, and a process that may read them."""

import shutil

import pytest
import torch
import torch.distributed as dist

from launch.backends.processes import run_processes
from tests.suite.pipeline.build import join
from tests.suite.training.work import run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three checkpoints were due, at 20, 40 and 60; the newest two are kept."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_processes(run, 1, 1, 1, 60, str(folder))
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "copy")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """This process is a worker without others."""
    join(0, 1, f"file://{tmp_path_factory.mktemp('meeting')}/rendezvous", torch.get_num_threads())
    yield
    dist.destroy_process_group()
