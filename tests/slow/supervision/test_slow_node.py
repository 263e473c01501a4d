"""A slow node of a Ray cluster, in seconds: ``make test-faults`` runs this file alone."""

import re
from pathlib import Path

from tests.faults import bad_node
from tests.faults.injection import VARIABLE
from tests.slow.supervision import test_nodes

machines, drive = test_nodes.machines, test_nodes.drive


def test_a_slow_node_is_named_within_23_steps(machines, drive, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{Path(bad_node.__file__).resolve()}:be_slow")
    driver = drive(machines(4), "pipeline.replicas=2", steps=30)
    driver.wait()
    said = (driver.run / "messages.log").read_text()
    named = re.findall(r"step (\d+): replica (\d), stage (\d) on \S+ computes \S+ times as long as its peers", said)
    assert sorted(stage for _, _, stage in named) == ["0", "1"]
    assert {replica for _, replica, _ in named} == {"1"}
    assert all(int(step) <= 23 for step, *_ in named)
