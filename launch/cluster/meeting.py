"""How the workers of an attempt meet in torch.distributed: as Ray Train has them, over the cluster's own network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch import TorchConfig

from launch.cluster.network import use_interface_of

_RayMeeting: Any = TorchConfig().backend_cls


class _Meeting(_RayMeeting):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        """Says to each worker which interface is its node's, then has them meet."""
        worker_group.execute(_use_own_interface)
        super().on_start(worker_group, backend_config)


def _use_own_interface() -> None:
    use_interface_of(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@dataclass
class Meeting(TorchConfig):
    """Ray Train's own settings of the process group."""

    @property
    def backend_cls(self) -> Any:
        """What sets it up."""
        return _Meeting
