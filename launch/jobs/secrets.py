"""Stores this machine's secret on a cluster for a submitted job; ``launch/backends/secrets.py`` claims it there."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from experiments.base.hints import command, option
from launch.backends.network_interface import interface_of
from launch.backends.secrets import PLACE, SECRET
from launch.jobs.client import JobClient, JobError
from suite.errors import SuiteError


def check_safe(client: JobClient) -> None:
    """Raises JobError if this machine's secret would go to a cluster without a token, or over plain http to another
    machine."""
    if not os.environ.get(SECRET):
        return
    if not client.asks_for_token():
        why = "requires no token: anyone who can reach it could read the key"
    elif client.address.startswith("http://") and not is_this_machine(urlsplit(client.address).hostname or ""):
        why = "is reached over plain http: anyone on the network path could read the key"
    else:
        return
    raise JobError(
        f"{SECRET} is set, and the cluster at {client.address} {why}; nothing was uploaded. Submit without the key "
        f"(env -u {SECRET} {command('submit')} ...): wandb then writes offline and {command('sync')} uploads it. Or "
        f"send it anyway with {option('SEND_KEY', '1')}, or secure the cluster (docs/cluster.md, Secrets)"
    )


def is_this_machine(host: str) -> bool:
    """Returns whether all addresses of a host belong to this machine."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(ip).is_loopback or interface_of(ip) is not None for ip in addresses)


def stash_secret(client: JobClient) -> dict[str, str]:
    """Stores this machine's secret on the cluster, if it has one; returns the job's variable with its location."""
    secret = os.environ.get(SECRET)
    if not secret:
        return {}
    name = f"_ray_pkg_{secrets.token_hex(16)}.zip"  # Ray stores packages only; nothing unpacks this one
    variables = {PLACE: f"gcs://{name}"}
    try:
        client.put_package(name, secret.encode())
        client.expire_package(name)
    except BaseException:
        discard_secret(client, variables)
        raise
    return variables


def wandb_mode_only() -> dict[str, str]:
    """Returns the variable that tells a job without the key that there is one: the doctor then checks that nodes reach
    wandb."""
    return {"WANDB_MODE": "online"} if os.environ.get(SECRET) and not os.environ.get("WANDB_MODE") else {}


def discard_secret(client: JobClient, variables: dict[str, str]) -> None:
    """Overwrites the stored secret of a job that was not submitted, if the cluster can be reached."""
    if place := variables.get(PLACE):
        with suppress(SuiteError):
            client.put_package(place.removeprefix("gcs://"), b"")
