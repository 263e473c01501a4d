"""Passes a secret to a job and its workers, in memory only.

A job's environment variables are not safe: Ray shows them in the job's record, and writes them to
``runtime_env_agent.log`` on every node. Instead the secret is stored in the cluster's key-value store, under a name
that only the job knows. The driver moves it into its environment, and an actor that ends with the driver serves it to
the workers.

laptop --PUT--> key-value store --> driver's environment --> actor --> workers' environment
(launch/jobs/secrets.py)   ------------------- this module -------------------------------
"""

from __future__ import annotations

import os

from experiments.base.hints import command
from launch.ray_nodes import own_node, start_on
from suite.errors import first_line

SECRET = "WANDB_API_KEY"
PLACE = "GPIPE_SECRET"
"""Environment variable of a job: the secret's name in the key-value store. Ray deletes it after ten minutes; a driver
that starts later uses wandb offline."""

ACTOR = "gpipe-secret"

ANSWER_S = 30.0
"""Seconds for the actor to answer a worker."""


def claim_secret() -> str | None:
    """Moves the secret from the store into this driver's environment. Returns None, or a sentence if the secret is no
    longer there."""
    place = os.environ.pop(PLACE, "")
    if not place:
        return None
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    store = GcsClient(address=os.environ["RAY_ADDRESS"])
    secret = store.internal_kv_get(place.encode(), None, timeout=10)
    if not secret:
        os.environ["WANDB_MODE"] = "offline"
        later = command("sync")
        return f"{SECRET} has expired before this job started: wandb records offline; upload later with `{later}`"
    store.internal_kv_del(place.encode(), False, None, timeout=10)
    os.environ[SECRET] = secret.decode()
    return None


def serve_secret() -> object | None:
    """Starts the actor that serves the secret to workers, if there is a secret and a cluster at RAY_ADDRESS.

    The actor ends with this driver, or when the returned handle is deleted.
    """
    if not (secret := os.environ.get(SECRET)) or not os.environ.get("RAY_ADDRESS"):
        return None

    class Keeper:
        def __init__(self, secret: str) -> None:
            self._secret = secret

        def get(self) -> str:
            return self._secret

    # on the driver's node, so that it survives the loss of any other node
    keeper: object = start_on(own_node(), Keeper, secret, name=ACTOR, get_if_exists=True)
    return keeper


def load_secret() -> None:
    """Loads the secret into this worker's environment, if the driver has one. Without an answer the worker continues
    with wandb offline: a missing key must not fail an attempt."""
    import ray

    if SECRET in os.environ:
        return
    try:
        keeper = ray.get_actor(ACTOR)
        secret: str = ray.get(keeper.get.remote(), timeout=ANSWER_S)  # type: ignore[assignment]
        os.environ[SECRET] = secret
    except ValueError:  # no such actor
        return
    except Exception as error:
        first = first_line(error)
        print(
            f"could not get {SECRET} from the driver ({type(error).__name__}: {first}): wandb records offline",
            flush=True,
        )
        os.environ["WANDB_MODE"] = "offline"
