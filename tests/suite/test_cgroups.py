"""Limits of control groups: both versions as files, and a real group of this kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suite.cgroups import cpu_limit, memory_limit_bytes
from tests.control_groups import control_groups

GIB = 2**30
ALL = 2**63 - 4096
"""Version 1's value for a group without a limit."""


def group(tree, own, **files):
    """Writes files of groups: ``a__b__cpu_max`` is ``a/b/cpu.max``."""
    for name, text in files.items():
        *folders, file = name.split("__")
        place = tree.joinpath(*folders)
        place.mkdir(parents=True, exist_ok=True)
        head, _, rest = file.partition("_")
        (place / f"{head}.{rest}").write_text(text)
    (tree / "own").write_text(own)
    return {"tree": tree, "own": tree / "own"}


@pytest.fixture
def machine(monkeypatch):
    """Sixteen cores, 64 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


def test_a_version_2_container_sees_its_own_group_as_the_root(machine, tmp_path):
    here = group(tmp_path, "0::/\n", cpu_max="250000 100000\n", memory_max=f"{8 * GIB}\n")
    assert (cpu_limit(**here), memory_limit_bytes(**here)) == (2, 8 * GIB)


def test_the_smallest_limit_of_a_group_and_its_parents_counts(machine, tmp_path):
    here = group(
        tmp_path, "0::/slurm/job_7\n", slurm__cpu_max="400000 100000", slurm__memory_max=f"{12 * GIB}",
        slurm__job_7__cpu_max="max 100000", slurm__job_7__memory_max=f"{20 * GIB}",
    )  # fmt: skip
    assert (cpu_limit(**here), memory_limit_bytes(**here)) == (4, 12 * GIB)


def test_version_1_has_a_hierarchy_per_resource_and_containers_have_another_path(machine, tmp_path):
    own = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"
    here = group(
        tmp_path, own, memory__memory_limit_in_bytes=f"{6 * GIB}", cpu__cpu_cfs_quota_us="300000",
        cpu__cpu_cfs_period_us="100000",
    )  # fmt: skip
    assert (cpu_limit(**here), memory_limit_bytes(**here)) == (3, 6 * GIB)


@pytest.mark.parametrize("own", ["0::/\n", "5:memory:/\n4:cpu,cpuacct:/\n", ""])
def test_without_limits_the_machines_size_counts(machine, tmp_path, own):
    here = group(
        tmp_path, own, cpu_max="max 100000", memory_max="max", memory__memory_limit_in_bytes=f"{ALL}",
        cpu__cpu_cfs_quota_us="-1", cpu__cpu_cfs_period_us="100000",
    )  # fmt: skip
    assert (cpu_limit(**here), memory_limit_bytes(**here)) == (16, 64 * GIB)
    none = tmp_path / "none"
    assert (cpu_limit(none, none), memory_limit_bytes(none, none)) == (16, 64 * GIB)


def test_less_than_one_core_counts_as_one(machine, tmp_path):
    assert cpu_limit(**group(tmp_path, "0::/\n", cpu_max="50000 100000")) == 1


V1 = {
    "memory": {"memory.limit_in_bytes": 2**29}, "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 100_000},
}  # fmt: skip
V2 = {"memory.max": 2**29, "cpu.max": "100000 100000"}


def test_a_process_in_a_real_group_finds_its_limits():
    code = "import os, sys\nfor path in sys.argv[1:]: open(path, 'w').write(str(os.getpid()))\n"
    code += "from suite.cgroups import cpu_limit, memory_limit_bytes; print(cpu_limit(), memory_limit_bytes())"
    root = Path(__file__).parents[3]
    with control_groups(V1, V2) as groups:
        paths = [str(place / "cgroup.procs") for place in groups]
        done = subprocess.run(
            [sys.executable, "-c", code, *paths], cwd=root, capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == ["1", str(2**29)]
