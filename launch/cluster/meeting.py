"""What Ray Train sets up on each device before its agent begins: the network interface, and the GPUs that it sees.

Workers meet in torch.distributed by themselves; Ray Train's own process group would be one of agents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from launch.cluster.network import use_interface_of


class _Meeting(Backend):
    share_cuda_visible_devices = True
    """NCCL copies from GPU to GPU only where a process sees both."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Says to each agent which interface is its node's."""
        worker_group.execute(_use_own_interface)


def _use_own_interface() -> None:
    use_interface_of(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@dataclass
class Meeting(BackendConfig):
    """Ray Train's settings of it."""

    @property
    def backend_cls(self) -> Any:
        """What sets it up."""
        return _Meeting
