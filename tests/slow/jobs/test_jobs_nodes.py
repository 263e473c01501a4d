"""Jobs on a cluster of several nodes, as a person at a laptop submits them: a head without devices, two nodes with one
core each."""

import re
import time

import pytest

from tests.launch.train.test_end_to_end import SMALL, losses
from tests.slow.jobs_head import Head


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    one = Head(tmp_path_factory.mktemp("laptop"), cores=0)
    try:
        one.wait()
        count = "import ray; ray.init(log_to_driver=False); print('cores', ray.cluster_resources().get('CPU', 0))"
        for cores in (1, 2):
            one.join(cores=1)  # one after the other: of two that begin on one machine at once Ray may lose one
            until = time.monotonic() + 120
            while f"cores {cores}.0" not in one.python(count, RAY_ADDRESS=one.ray):
                assert time.monotonic() < until, (one.folder / "head.log").read_text()
        yield one
    finally:
        one.end()


def test_without_a_folder_for_all_nodes_nothing_goes_up(head):
    said = head.gpipe("submit", "t128_6b", "--job", "homeless", code=2)
    assert "the cluster has 3 nodes, and a run needs storage shared by all of them: give STORAGE=" in said
    assert "homeless" not in head.gpipe("jobs")


def test_a_run_is_planned_measured_and_trained_over_the_nodes_and_fetched(head):
    settings = f"{SMALL} train.steps=6 pipeline.stages=2 tracking.wandb=disabled"
    printed = head.gpipe(
        "submit", "t24_1_3b_wide", "--scale", "laptop", "--set", settings, "--storage", str(head.storage),
        "--job", "two",
    )  # fmt: skip
    assert printed.splitlines()[-1] == "job two is done"
    assert re.search(r"plan of t24_1_3b_wide on 2 CPU cores .* on 2 nodes; simulated from measured", printed), printed
    assert re.search(r"replica 0: stage 0 on .*, stage 1 on ", printed), printed  # of one node: stages 0-1
    (run,) = head.storage.glob("runs/t24_1_3b_wide/*")
    head.gpipe("fetch", "two")
    assert losses(head.folder / "runs" / run.parent.name / run.name) == losses(run)
    assert len(losses(run)) == 6


def test_a_sweep_shares_the_cluster_and_its_report_is_fetched(head):
    printed = head.gpipe(
        "submit", "bilingual", "--scale", "tiny", "--storage", str(head.storage), "--job", "three", seconds=600
    )  # fmt: skip
    assert printed.splitlines()[-1] == "job three is done"
    report = head.storage / "runs/bilingual-tiny/report.md"
    head.gpipe("fetch", "three")
    assert (head.folder / "runs/bilingual-tiny/report.md").read_bytes() == report.read_bytes()
    assert "left out" not in report.read_text()
