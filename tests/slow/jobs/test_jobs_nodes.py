"""Jobs on a cluster of several nodes: a head without devices, two nodes with one core each."""

import re
import time

import pytest

from tests.launch.command_line import SMALL, losses
from tests.slow.jobs_head import running_head


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    with running_head(tmp_path_factory.mktemp("laptop"), cores=0) as head:
        count = "import ray; ray.init(log_to_driver=False); print('cores', ray.cluster_resources().get('CPU', 0))"
        for cores in (1, 2):
            head.join(cores=1)  # one by one: Ray may lose one of two that start on one machine at once
            until = time.monotonic() + 120
            while f"cores {cores}.0" not in head.python(count, RAY_ADDRESS=head.ray):
                assert time.monotonic() < until, (head.folder / "head.log").read_text()
        yield head


def test_without_a_shared_folder_a_job_ends_with_one_sentence(head):
    printed = head.gpipe("submit", "t128_6b", "--job", "homeless", code=2)
    assert "error: the cluster has 3 nodes, and a run needs storage shared by all of them: give --storage" in printed


def test_a_run_uses_several_nodes(head):
    settings = f"{SMALL} train.steps=6 pipeline.stages=2 tracking.wandb=disabled"
    printed = head.gpipe(
        "submit", "t24_1_3b_wide", "--scale", "laptop", "--set", settings, "--storage", str(head.storage),
        "--job", "two",
    )  # fmt: skip
    assert printed.splitlines()[-2] == "job two is done"
    assert re.search(r"^all \d pinned packages are installed on 3 nodes$", printed, re.MULTILINE)
    assert re.search(r"plan of t24_1_3b_wide on 2 CPU cores .* on 2 nodes; simulated from measured", printed), printed
    assert re.search(r"replica 0: stage 0 on .*, stage 1 on ", printed), printed  # of one node: stages 0-1
    (run,) = head.storage.glob("runs/t24_1_3b_wide/*")
    assert len(losses(run)) == 6


def test_a_sweep_shares_the_cluster_and_its_report_is_named(head):
    printed = head.gpipe(
        "submit", "temperature", "--scale", "tiny", "--storage", str(head.storage), "--job", "three", seconds=600
    )  # fmt: skip
    folder = head.storage / "runs/temperature-tiny"
    assert printed.splitlines()[-2:] == ["job three is done", f"its page: cp {folder}/report.html ."]
    assert "excluded from" not in (folder / "report.md").read_text()
