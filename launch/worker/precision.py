"""bf16 on devices that cannot multiply it: the run goes on in fp32."""

from __future__ import annotations

from experiments.base.cluster import Cluster
from experiments.base.experiment import Experiment
from launch.worker.devices import BF16_CAPABILITY, cpu_model, multiplies_bf16
from suite.log import Log


def with_available_precision(chosen: Experiment, cluster: Cluster, log: Log) -> Experiment:
    """Returns a new run's experiment, in fp32 if its devices cannot multiply bf16; then logs that. A resumed run keeps
    its precision. The processor is this machine's, also for a cluster."""
    is_gpu = cluster.kind == "gpu"
    if chosen.optimizer.precision != "bf16" or (cluster.has_bf16 if is_gpu else multiplies_bf16()):
        return chosen
    device = cluster.name or "GPU" if is_gpu else cpu_model()
    needed = f"compute capability {BF16_CAPABILITY}.0, as an A100 has" if is_gpu else "avx512_bf16 or amx_bf16"
    log(
        f"optimizer.precision is bf16, and {device} has no instructions for its products ({needed}), so it would be "
        "slower than fp32: the run uses optimizer.precision=fp32"
    )
    optimizer = chosen.optimizer.model_copy(update={"precision": "fp32"})
    return chosen.model_copy(update={"optimizer": optimizer})
