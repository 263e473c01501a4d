"""``transformer_<L>``: the sizes of Table 1, invalid names, and the largest model, planned without its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.translation.language_model import find_language_model
from suite.pipeline.model.layers import count_parameters


# Table 1 of the paper: 282.2M, 785.8M, 5.3B, 21.0B, 83.9B.
@pytest.mark.parametrize(
    ("layers", "printed"), [(3, 282.2e6), (13, 785.8e6), (103, 5.3e9), (415, 21.0e9), (1663, 83.9e9)]
)
def test_parameters_are_those_of_table_1(layers: int, printed: float) -> None:
    result = find_language_model(f"transformer_{layers}", 128)
    assert result is not None
    model, _ = result.build()
    assert len(model) == layers + 2
    assert count_parameters(model) == pytest.approx(printed, rel=0.005)


@pytest.mark.parametrize(
    "name",
    ["transformer_0", "transformer_-3", "transformer_03", "transformer_", "transformer", "transformer_3b",
     "transformer_3 ", "transformer_1.5", "Transformer_3", "transformer_1663_", "t128_6b", "transformer_1234567", ""],
)  # fmt: skip
def test_other_names_are_not_language_models(name: str) -> None:
    assert find_language_model(name, 8) is None


@pytest.mark.parametrize(("devices", "stages"), [(0, 1), (1, 1), (4, 4), (5, 5), (64, 5)])
def test_one_stage_per_device_but_never_more_than_layers(devices: int, stages: int) -> None:
    result = find_language_model("transformer_3", devices)
    assert result is not None
    assert result.name == "transformer_3"
    assert (result.pipeline.stages, result.pipeline.micro_batches, result.pipeline.replicas) == (stages, 32, 1)
    assert (result.examples, result.batch) == (32, 32 * 1024)


LARGEST = """
import json, resource, time
from experiments.base.cluster import Cluster, parse_cluster
from experiments.translation.language_model import find_language_model
from experiments.planning.planner import estimated_costs, plan_workload

cluster = parse_cluster("128x16GiB", Cluster(2, 2**33, "cpu"))
model = find_language_model("transformer_1663", cluster.devices)
begin = time.process_time()
model.build()
built = time.process_time()
planned = plan_workload(model, cluster, estimated_costs)
times = (time.process_time() - built) / (built - begin)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"plan": planned.as_dict(), "times": times, "peak": peak}))
"""


def test_the_papers_largest_is_planned_quickly_and_without_its_memory() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", LARGEST], cwd=root, capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    plan = result["plan"]
    # L * (12d^2 + 13d) + 2Vd + V, the paper's 83.9B
    assert plan["parameters"] == 83_876_910_336 == 1663 * (12 * 2048**2 + 13 * 2048) + 2 * 32_000 * 2048 + 32_000
    assert sum(plan["cells"]) == plan["layers"] == 1665
    assert len(plan["cells"]) == plan["K"] == 128
    assert sum(stage["parameters"] for stage in plan["stages"]) == plan["parameters"]
    assert max(stage["peak_bytes"] for stage in plan["stages"]) <= plan["device_bytes"] == 16 * 2**30
    assert result["times"] < 10  # as long as building its layers without memory, which planning does twice itself
    assert result["peak"] < 2 * 2**30
