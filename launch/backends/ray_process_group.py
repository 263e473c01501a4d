"""What Ray Train sets up on each device before its agent starts: the network interface and the visible GPUs.

It creates no process group: that would connect the agents, while the workers create their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from launch.backends.interfaces import use_interface_of


class _TorchBackend(Backend):
    share_cuda_visible_devices = True
    """NCCL copies directly between GPUs only if a process sees both."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Selects the network interface in each agent's process."""
        worker_group.execute(_use_own_interface)


def _use_own_interface() -> None:
    use_interface_of(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


@dataclass
class TorchBackendConfig(BackendConfig):
    """Ray Train's configuration class for this backend."""

    @property
    def backend_cls(self) -> Any:
        """The backend's class."""
        return _TorchBackend
