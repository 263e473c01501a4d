"""A secret's way to the job that needs it: in memory all the way.

Environment variables of a job are no way: Ray shows them in the job's record, and writes them into
``runtime_env_agent.log`` of every node. So the key goes into the cluster's key-value store, under a name that only the
job is told; the driver takes it out there and keeps it in its environment, and an actor that ends with the driver hands
it to the workers.

laptop --PUT--> key-value store --> driver's environment --> actor --> workers' environment
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.jobs.door import Door

SECRET = "WANDB_API_KEY"
PLACE = "GPIPE_SECRET"
"""Environment variable of a job: where the secret waits for its driver. Ray forgets it after ten minutes."""

ACTOR = "gpipe-secret"


def leave(door: Door) -> dict[str, str]:
    """Leaves this machine's secret on the cluster, if it has one; returns the job's variable that says where."""
    secret = os.environ.get(SECRET)
    if not secret:
        return {}
    name = f"_ray_pkg_{secrets.token_hex(16)}.zip"  # Ray takes packages only; nothing unpacks this one
    door.put_package(name, secret.encode())
    return {PLACE: f"gcs://{name}"}


def take() -> str | None:
    """Takes the secret into this driver's environment and out of the store, and returns None; a sentence where it is
    gone."""
    place = os.environ.pop(PLACE, "")
    if not place:
        return None
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    store = GcsClient(address=os.environ["RAY_ADDRESS"])
    found = store.internal_kv_get(place.encode(), None, timeout=10)
    if not found:
        return f"{SECRET} is no longer where it was left for this job: wandb writes offline, and `wandb sync` sends it"
    store.internal_kv_del(place.encode(), False, None, timeout=10)
    os.environ[SECRET] = found.decode()
    return None


def hand_out() -> object | None:
    """Makes the actor that the workers ask, if there is a secret and the cluster is another than this machine's.

    It ends with this driver, or when what is returned is let go of.
    """
    if not (secret := os.environ.get(SECRET)) or not os.environ.get("RAY_ADDRESS"):
        return None
    import ray

    class Keeper:
        def __init__(self, secret: str) -> None:
            self._secret = secret

        def get(self) -> str:
            return self._secret

    keeper: object = ray.remote(Keeper).options(name=ACTOR, num_cpus=0, get_if_exists=True).remote(secret)
    return keeper


def receive() -> None:
    """Takes the secret into this worker's environment, if the driver has one."""
    import ray

    if SECRET in os.environ:
        return
    try:
        keeper = ray.get_actor(ACTOR)
    except ValueError:  # there is no such actor
        return
    secret: Any = ray.get(keeper.get.remote(), timeout=30)
    os.environ[SECRET] = secret
