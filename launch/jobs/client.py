"""The client of a Ray cluster's job API. Checks address, token and version; every failure is one sentence."""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

import ray
import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from experiments.base.hints import option
from suite.errors import SuiteError, first_line, nearest
from suite.paths import hide_secrets

CONNECT_S = 5.0
"""Seconds for a running machine to accept a connection."""

ANSWER_S = 20.0
"""Seconds for a dashboard to answer, even on a busy machine."""

TRANSFER_S = 120.0
"""Seconds without progress that a request for a package or a log may take."""

METADATA_KEY = "gpipe"
"""Metadata key that holds what a job runs; jobs without it are not this suite's."""

for _logger_name in (
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
    if not address:
        raise JobError(f"which cluster? Give {option('ADDRESS', 'http://<head>:8265')}, or set RAY_API_SERVER_ADDRESS")
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise JobError(
            f"{address} is not a dashboard address; jobs are submitted to {option('ADDRESS', 'http://<head>:8265')}"
        )
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
    """Ray's job client with a deadline for each request and one sentence for each failure."""

    def __init__(self, address: str) -> None:
        """Raises UnreachableError when nothing answers, JobError for a missing or wrong token or Ray version."""
        url = address_of(address)
        self.address = hide_secrets(url)
        """As people see it."""
        os.environ["RAY_API_SERVER_ADDRESS"] = url  # Ray's client prefers it to its argument
        # Ray's heads and drivers use any token they find; its job client does not
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            super().__init__(url)
        except AuthenticationError:  # RAY_AUTH_MODE=token, and there is no token
            raise JobError(_no_token(self.address)) from None
        except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
            raise UnreachableError(
                f"the server at {self.address} is not a Ray dashboard ({first_line(error)[:200]}); submit to the "
                f"head's dashboard port, {option('ADDRESS', 'http://<head>:8265')}"
            ) from None
        if self._server_ray_version != ray.__version__:
            raise JobError(
                f"the cluster at {self.address} runs Ray {self._server_ray_version}, this machine "
                f"Ray {ray.__version__}; install ray=={ray.__version__} on its nodes"
            )

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        timeout_s = TRANSFER_S if method == "PUT" or endpoint.endswith("/logs") else ANSWER_S
        try:
            return super()._do_request(method, endpoint, timeout=(CONNECT_S, timeout_s), **options)
        except AuthenticationError as error:
            missing = str(error).startswith("Authentication required")
            raise JobError(_no_token(self.address) if missing else _wrong_token(self.address)) from None
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.InvalidURL) as error:
            timed_out = isinstance(error, requests.ReadTimeout)
            how = f"no answer in {timeout_s:.0f} s" if timed_out else "no connection"
            raise UnreachableError(
                f"no Ray cluster answers at {self.address} ({how}); check that its head runs, that its dashboard "
                "listens on all interfaces (--dashboard-host 0.0.0.0), and that no firewall blocks the port"
            ) from None

    def _raise_error(self, r: requests.Response) -> NoReturn:
        reason = (r.text.strip().splitlines() or ["no reason given"])[-1][:300]
        fault = f"the cluster at {self.address} rejected the request: {reason} (status {r.status_code})"
        raise (UnreachableError(f"{fault}; try again, and check its head") if r.status_code >= 500 else JobError(fault))

    def asks_for_token(self) -> bool:
        """Returns whether the cluster requires a token. Raises UnreachableError when it does not answer."""
        try:
            response = requests.get(f"{self._address}/api/version", timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise UnreachableError(
                f"cannot find out whether the cluster at {self.address} requires a token "
                f"({first_line(error)[:200]}); try again"
            ) from None
        return response.status_code in (401, 403)

    def suite_jobs(self) -> list[JobDetails]:
        """Returns this suite's jobs, newest first."""
        jobs = [job for job in self.list_jobs() if job.submission_id and METADATA_KEY in (job.metadata or {})]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, job: str) -> JobDetails:
        """Returns a job. Raises JobError with the closest names for an unknown one."""
        known = {details.submission_id: details for details in self.suite_jobs() if details.submission_id}
        names = nearest(job, known) if known else "it has no jobs of this suite"
        if not job:
            raise JobError(f"which job? Name one with {option('JOB')}; {names}")
        if job not in known:
            raise JobError(f"no job {job!r} on the cluster at {self.address}: {names}")
        return known[job]


def _no_token(address: str) -> str:
    return (
        f"the cluster at {address} requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH (a file with the token), or write the token to ~/.ray/auth_token"
    )


def _wrong_token(address: str) -> str:
    """Returns the message for a rejected token: its source in Ray's order of precedence, never the token itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        source = "RAY_AUTH_TOKEN"
    elif path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        source = f"RAY_AUTH_TOKEN_PATH={path}"
    else:
        source = "~/.ray/auth_token"
    return f"the cluster at {address} rejects the token from {source}: it belongs to another cluster or has expired"
