"""bf16 on processors that cannot multiply it: the run goes on in fp32."""

from __future__ import annotations

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from launch.worker.devices import cpu_model, multiplies_bf16
from suite.log import Log


def with_available_precision(chosen: Experiment, cluster: Cluster, log: Log) -> Experiment:
    """Returns a new run's experiment, in fp32 if its cores cannot multiply bf16; then logs that. A resumed run keeps
    its precision. The processor is this machine's, also for a cluster."""
    if chosen.optimizer.precision != "bf16" or cluster.kind != "cpu" or multiplies_bf16():
        return chosen
    log(
        f"optimizer.precision is bf16, and this machine's {cpu_model()} has no instructions for its products "
        "(avx512_bf16 or amx_bf16), so it would be slower than fp32: the run uses optimizer.precision=fp32"
    )
    optimizer = chosen.optimizer.model_copy(update={"precision": "fp32"})
    return chosen.model_copy(update={"optimizer": optimizer})
