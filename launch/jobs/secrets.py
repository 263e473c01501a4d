"""A secret's way to the job that needs it: in memory all the way.

Environment variables of a job are no way: Ray shows them in the job's record, and writes them into
``runtime_env_agent.log`` of every node. So the key goes into the cluster's key-value store, under a name that only the
job is told; the driver takes it out there and keeps it in its environment, and an actor that ends with the driver hands
it to the workers.

laptop --PUT--> key-value store --> driver's environment --> actor --> workers' environment
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from launch.cluster.network import interface_of
from suite.errors import SuiteError

if TYPE_CHECKING:
    from launch.jobs.door import Door

SECRET = "WANDB_API_KEY"
PLACE = "GPIPE_SECRET"
"""Environment variable of a job: where the secret waits for its driver. Ray forgets it ten minutes after it was left: a
driver that begins later writes offline."""

ACTOR = "gpipe-secret"

ANSWER_S = 30.0
"""Seconds for the actor to answer a worker."""


def check_safe(door: Door) -> None:
    """Raises JobError where this machine's secret would go to a cluster that lets everyone in, or over plain http to
    another machine."""
    if not os.environ.get(SECRET):
        return
    from launch.jobs.door import JobError

    if not door.asks_for_token():
        why = "asks for no token: whoever reaches it could read the key"
    elif door.address.startswith("http://") and not is_this_machine(urlsplit(door.address).hostname or ""):
        why = "is reached over plain http: whoever is on the way could read the key"
    else:
        return
    raise JobError(
        f"{SECRET} is set, and the cluster at {door.address} {why}; nothing was uploaded. Submit without it, wandb "
        f"then writes offline and make sync sends it (env -u {SECRET} make submit ...), or with SEND_KEY=1 all the "
        "same, or mend the cluster (docs/cluster.md, Secrets)"
    )


def is_this_machine(host: str) -> bool:
    """Whether all addresses of a host are this machine's."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(one).is_loopback or interface_of(one) is not None for one in found)


def leave(door: Door) -> dict[str, str]:
    """Leaves this machine's secret on the cluster, if it has one; returns the job's variable that says where."""
    secret = os.environ.get(SECRET)
    if not secret:
        return {}
    name = f"_ray_pkg_{secrets.token_hex(16)}.zip"  # Ray takes packages only; nothing unpacks this one
    left = {PLACE: f"gcs://{name}"}
    try:
        door.put_package(name, secret.encode())
        door.expire_package(name)
    except BaseException:
        take_back(door, left)
        raise
    return left


def mode_alone() -> dict[str, str]:
    """Returns the job's variable that says that there is a key, for a job that is not given it: the doctor looks
    whether nodes reach wandb."""
    return {"WANDB_MODE": "online"} if os.environ.get(SECRET) and not os.environ.get("WANDB_MODE") else {}


def take_back(door: Door, variables: dict[str, str]) -> None:
    """Overwrites the secret that was left for a job that did not come to be, as far as the cluster can be reached."""
    if place := variables.get(PLACE):
        with suppress(SuiteError):
            door.put_package(place.removeprefix("gcs://"), b"")


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
        os.environ["WANDB_MODE"] = "offline"
        return f"{SECRET} is no longer where it was left for this job: wandb writes offline, and `make sync` sends it"
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
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Keeper:
        def __init__(self, secret: str) -> None:
            self._secret = secret

        def get(self) -> str:
            return self._secret

    # on the driver's own node: another one that is lost would take it along, and the next attempt's workers ask again
    where = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    keeper: object = (
        ray.remote(Keeper).options(name=ACTOR, num_cpus=0, get_if_exists=True, scheduling_strategy=where).remote(secret)
    )
    return keeper


def receive() -> None:
    """Takes the secret into this worker's environment, if the driver has one. Without an answer the worker goes on, and
    wandb writes offline: no key is worth an attempt."""
    import ray

    if SECRET in os.environ:
        return
    try:
        keeper = ray.get_actor(ACTOR)
    except ValueError:  # there is no such actor
        return
    except Exception as error:
        _go_offline(error)
        return
    try:
        secret: Any = ray.get(keeper.get.remote(), timeout=ANSWER_S)
    except Exception as error:
        _go_offline(error)
        return
    os.environ[SECRET] = secret


def _go_offline(error: Exception) -> None:
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    print(f"{SECRET} did not come from the driver ({type(error).__name__}: {first}): wandb writes offline", flush=True)
    os.environ["WANDB_MODE"] = "offline"
