"""Ray's job client, with a deadline for each request and one sentence for each failure."""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

import ray
import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from experiments.base.hints import option
from suite.errors import SuiteError, first_line
from suite.paths import hide_secrets

CONNECT_S, ANSWER_S, TRANSFER_S = 5.0, 20.0, 120.0
"""Seconds to connect, for an answer of a busy dashboard, and without progress while a package or a log travels."""

for _logger_name in (
    "ray._private.runtime_env.packaging",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.authentication.authentication_token_setup",
):
    logging.getLogger(_logger_name).setLevel(logging.ERROR)


class JobError(SuiteError):
    """A cluster rejects a job, or a job request is invalid."""


class UnreachableError(JobError):
    """A cluster does not answer at present; a later attempt may succeed."""


def address_of(address: str) -> str:
    """Returns the address of a cluster's dashboard: ``address``, or else Ray's own RAY_API_SERVER_ADDRESS.

    Raises JobError without either, and for an address that cannot be a dashboard's.
    """
    address = (address or os.environ.get("RAY_API_SERVER_ADDRESS", "")).strip().rstrip("/")
    dashboard = option("ADDRESS", "http://<head>:8265")
    if not address:
        raise JobError(f"which cluster? Give {dashboard}, or set RAY_API_SERVER_ADDRESS")
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise JobError(f"{address} is not a dashboard address; jobs are submitted to {dashboard}")
    return address


def is_dashboard(address: str) -> bool:
    """Returns whether an address is a dashboard's: by its form, or because ``host:port`` answers as one in 3 s."""
    if "://" in address or not address:
        return address.startswith(("http://", "https://"))
    try:
        response = requests.get(f"http://{address}/api/version", timeout=3.0)
        return response.status_code in (401, 403) or "ray_version" in response.json()
    except (requests.RequestException, ValueError, TypeError):  # Ray's own port speaks no HTTP
        return False


class JobClient(JobSubmissionClient):
    """Ray's job client; raises UnreachableError or JobError, each one sentence."""

    def __init__(self, address: str) -> None:
        """Raises UnreachableError when nothing answers, JobError for a missing or wrong token or Ray version."""
        url = address_of(address)
        self.address = hide_secrets(url)
        """As people see it."""
        os.environ["RAY_API_SERVER_ADDRESS"] = url  # Ray's client prefers it to its argument
        # Ray's heads and drivers use any token they find; its job client and its command line do not
        needs_mode = "RAY_AUTH_MODE" not in os.environ
        uses_token = maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        self.ray = "RAY_AUTH_MODE=token ray" if uses_token and needs_mode else "ray"
        """Ray's command line as a person has to type it."""
        try:
            super().__init__(url)
        except AuthenticationError:  # RAY_AUTH_MODE=token, and there is no token
            raise self._token_error("requires a token") from None
        except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
            raise UnreachableError(
                f"the server at {self.address} is not a Ray dashboard ({first_line(error)[:200]}); submit to the "
                f"head's dashboard port, {option('ADDRESS', 'http://<head>:8265')}"
            ) from None
        if (there := self._server_ray_version) != ray.__version__:
            raise JobError(
                f"the cluster at {self.address} runs Ray {there}, this machine Ray {ray.__version__}; on each of its "
                f"nodes: pip install 'ray[default]=={ray.__version__}'"
            )

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        timeout_s = TRANSFER_S if method == "PUT" or endpoint.endswith("/logs") else ANSWER_S
        try:
            return super()._do_request(method, endpoint, timeout=(CONNECT_S, timeout_s), **options)
        except AuthenticationError as error:
            missing = str(error).startswith("Authentication required")
            raise self._token_error("requires a token" if missing else "rejects this machine's token") from None
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.InvalidURL) as error:
            how = f"no answer in {timeout_s:.0f} s" if isinstance(error, requests.ReadTimeout) else "no connection"
            raise UnreachableError(
                f"no Ray cluster answers at {self.address} ({how}); check that its head runs, that its dashboard "
                "listens on all interfaces (--dashboard-host 0.0.0.0), and that no firewall blocks the port"
            ) from None

    def _token_error(self, fault: str) -> JobError:
        return JobError(
            f"the cluster at {self.address} {fault}: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH (a file with the cluster's token), or write it to ~/.ray/auth_token"
        )

    def _raise_error(self, r: requests.Response) -> NoReturn:
        lines = [line for line in r.text.splitlines() if line.strip(" .")]  # the head adds a full stop to an agent's
        reason = (lines or ["no reason given"])[-1][:300]
        fault = f"the cluster at {self.address} rejected the request: {reason} (status {r.status_code})"
        raise (UnreachableError(f"{fault}; try again, and check its head") if r.status_code >= 500 else JobError(fault))
