"""The way into a Ray cluster: its address, its token, its version. Whatever stands in the way is one sentence."""

from __future__ import annotations

import logging
import os
from typing import Any, NoReturn

import ray
import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from suite.errors import SuiteError, nearest

CONNECT_S = 5.0
"""Seconds in which a machine that is there takes a connection."""

ANSWER_S = 20.0
"""Seconds in which a dashboard answers, however busy its machine is."""

KNOCK_S = 3.0
"""Seconds in which a port must say that it is a dashboard's."""

MUCH_S = 120.0
"""Seconds for which a request may stand still that carries a package or a log."""

OURS = "gpipe"
"""Key of a job's metadata that says what it runs; jobs without it are others'."""

GIVE_TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (a file that holds it), or put it into "
    "~/.ray/auth_token"
)


for _talkative in (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.authentication.authentication_token_setup",
):
    logging.getLogger(_talkative).setLevel(logging.ERROR)


class JobError(SuiteError):
    """A cluster does not let a job in, or the job is not what was asked for."""


class AwayError(JobError):
    """A cluster does not answer, or cannot now: later it may."""


def address_of(asked: str) -> str:
    """Returns the address of a cluster's dashboard: as asked, or Ray's own RAY_API_SERVER_ADDRESS.

    Raises JobError without either, and for one that is no address of a dashboard.
    """
    address = (asked or os.environ.get("RAY_API_SERVER_ADDRESS", "")).strip().rstrip("/")
    if not address:
        raise JobError("which cluster? Give ADDRESS=http://<head>:8265, or set RAY_API_SERVER_ADDRESS")
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise JobError(f"{address} is no address of a dashboard, where jobs are taken: ADDRESS=http://<head>:8265")
    return address


def is_dashboard(address: str) -> bool:
    """Whether an address is a dashboard's: by its form, or because ``host:port`` answers as one."""
    if "://" in address or not address:
        return address.startswith(("http://", "https://"))
    try:
        response = requests.get(f"http://{address}/api/version", timeout=KNOCK_S)
        return response.status_code in (401, 403) or "ray_version" in response.json()
    except (requests.RequestException, ValueError, TypeError):  # Ray's own port speaks no HTTP
        return False


class Door(JobSubmissionClient):
    """Ray's client of its jobs, each request with a deadline, each failure a sentence."""

    def __init__(self, asked: str) -> None:
        """Raises AwayError where nothing answers, JobError for a missing or a wrong token, or another Ray version."""
        self.address = address_of(asked)
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address  # to Ray's client it counts more than what it is told
        # Ray's own rule for heads and drivers, which its client of jobs leaves out: a token that is at hand is used
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            super().__init__(self.address)
        except AuthenticationError:  # told to use a token, and found none
            raise JobError(_no_token(self.address)) from None
        except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
            raise AwayError(
                f"what answers at {self.address} is no dashboard of Ray ({_first(error)}); jobs are taken at the "
                "head's dashboard port, ADDRESS=http://<head>:8265"
            ) from None
        if self._server_ray_version != ray.__version__:
            raise JobError(
                f"the cluster at {self.address} runs Ray {self._server_ray_version}, here is Ray {ray.__version__}; "
                f"install ray=={ray.__version__} on its nodes"
            )

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        patience = MUCH_S if method == "PUT" or endpoint.endswith("/logs") else ANSWER_S
        try:
            return super()._do_request(method, endpoint, timeout=(CONNECT_S, patience), **options)
        except AuthenticationError as error:
            missing = str(error).startswith("Authentication required")
            raise JobError(_no_token(self.address) if missing else _wrong_token(self.address)) from None
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.InvalidURL) as error:
            late = isinstance(error, requests.ReadTimeout)
            how = f"no answer in {patience:.0f} s" if late else "no connection"
            raise AwayError(
                f"no Ray cluster answers at {self.address} ({how}); see that its head runs, that its dashboard listens "
                "beyond its own machine (--dashboard-host 0.0.0.0), and that no firewall is between"
            ) from None

    def _raise_error(self, r: requests.Response) -> NoReturn:
        said = (r.text.strip().splitlines() or ["no reason given"])[-1][:300]
        fault = f"the cluster at {self.address} did not do what it was asked: {said} (status {r.status_code})"
        raise (
            AwayError(f"{fault}; try again, and see that its head is well") if r.status_code >= 500 else JobError(fault)
        )

    def asks_for_token(self) -> bool:
        """Whether the cluster turns away who has no token. Raises AwayError where it does not say."""
        try:
            response = requests.get(f"{self.address}/api/version", timeout=(CONNECT_S, ANSWER_S))
        except requests.RequestException as error:
            raise AwayError(
                f"the cluster at {self.address} did not say whether it asks for a token ({_first(error)}); try again"
            ) from None
        return response.status_code in (401, 403)

    def put_package(self, name: str, data: bytes) -> None:
        """Puts bytes into the cluster's store of packages. Raises JobError where it does not take them."""
        response = self._do_request("PUT", f"/api/packages/gcs/{name}", data=data)
        if response.status_code != 200:
            self._raise_error(response)

    def expire_package(self, name: str) -> None:
        """Has the store forget a package in ten minutes: Ray holds one that is asked for so long and then deletes it,
        where no job uses it. Raises JobError where it does not."""
        response = self._do_request("GET", f"/api/packages/gcs/{name}")
        if response.status_code != 200:
            self._raise_error(response)

    def ours(self) -> list[JobDetails]:
        """Returns the jobs of this suite, the newest first."""
        jobs = [job for job in self.list_jobs() if job.submission_id and OURS in (job.metadata or {})]
        return sorted(jobs, key=lambda job: job.start_time or 0, reverse=True)

    def find(self, job: str) -> JobDetails:
        """Returns a job. Raises JobError with the nearest names to an unknown one."""
        ours = {one.submission_id: one for one in self.ours() if one.submission_id}
        if not job:
            raise JobError(f"which job? Name one with JOB=; {_known(ours)}")
        if job not in ours:
            raise JobError(f"no job {job!r} on the cluster at {self.address}: {_known(ours, job)}")
        return ours[job]


def _known(jobs: dict[str, JobDetails], job: str = "") -> str:
    return nearest(job, jobs) if jobs else "there are none of this suite's"


def _no_token(address: str) -> str:
    return f"the cluster at {address} asks for a token and got none: {GIVE_TOKEN}"


def _wrong_token(address: str) -> str:
    """Says where the token that was not taken came from, by Ray's own order; never the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        source = "RAY_AUTH_TOKEN"
    elif path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        source = f"RAY_AUTH_TOKEN_PATH={path}"
    else:
        source = "~/.ray/auth_token"
    return f"the cluster at {address} does not take the token of {source}: it is another cluster's, or an old one"


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
