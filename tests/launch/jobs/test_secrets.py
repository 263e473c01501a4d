"""The key of wandb goes to a cluster only where nobody else can read it, unless that is asked for."""

import http.server
import os
import socket
import threading
from pathlib import Path

import psutil
import pytest
import ray

from launch.jobs import secrets, submit
from launch.jobs.client import JobClient, JobError, UnreachableError
from launch.jobs.preflight import JobEnvironment
from launch.jobs.secrets import check_safe, is_this_machine
from launch.jobs.source_package import Package


class Dashboard(http.server.BaseHTTPRequestHandler):
    """As much of a Ray dashboard as is asked before a submission."""

    code = 200

    def do_GET(self):
        body = b'{"version": "4", "ray_version": "%s", "ray_commit": ""}' % ray.__version__.encode()
        self.send_response(200 if self.headers.get("authorization") else self.code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def dashboard():
    """Returns a way into a dashboard of this machine that answers without a token with a status code."""
    served = []

    def answering(code):
        server = http.server.HTTPServer(("127.0.0.1", 0), type("One", (Dashboard,), {"code": code}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        served.append((server, thread))
        client = object.__new__(JobClient)  # its constructor would keep a token in this process
        client.address = client._address = f"http://127.0.0.1:{server.server_port}"
        return client

    yield answering
    for server, thread in served:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")


def test_a_cluster_without_a_token_gets_no_key(dashboard, monkeypatch):
    client = dashboard(200)
    with pytest.raises(JobError, match=r"requires no token: .* nothing was uploaded.*SEND_KEY=1"):
        check_safe(client)
    monkeypatch.delenv("WANDB_API_KEY")
    check_safe(client)


@pytest.mark.parametrize("code", [401, 403])
def test_a_cluster_of_this_machine_that_asks_for_a_token_gets_the_key(dashboard, code):
    check_safe(dashboard(code))


def test_over_plain_http_no_key_goes_to_another_machine(dashboard, monkeypatch):
    client = dashboard(401)
    monkeypatch.setattr(JobClient, "asks_for_token", lambda self: True)  # no other machine is at hand
    for address in ("http://198.51.100.7:8265", "http://no-such-host.invalid:8265"):
        client.address = address
        with pytest.raises(JobError, match="plain http"):
            check_safe(client)
    client.address = "https://198.51.100.7"
    check_safe(client)


def test_a_cluster_that_does_not_say_whether_it_asks_gets_no_key(dashboard):
    client = dashboard(200)
    client.address = client._address = "http://127.0.0.1:9"
    with pytest.raises(UnreachableError, match=r"cannot find out whether .* requires a token"):
        check_safe(client)


def test_the_addresses_of_this_machine_are_known():
    for address in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        assert is_this_machine(address)
    for held in psutil.net_if_addrs().values():
        for one in held:
            if one.family == socket.AF_INET:
                assert is_this_machine(one.address)
    assert not is_this_machine("198.51.100.7")
    assert not is_this_machine("no-such-host.invalid")


def test_the_doctor_gets_no_key_and_knows_that_there_is_one(monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    sent = []

    class Listener:
        address = "http://127.0.0.1:8265"

        def submit_job(self, **job):
            sent.append(job)

        def put_package(self, *_):
            sent.append("key")

        def expire_package(self, _):
            return None

    environment, package = JobEnvironment(1, "/s", "", "python", {}, ()), Package(Path("a.zip"), 1, "c", ())
    for with_key in (False, True):
        sent.clear()
        submit._send(Listener(), "j", submit.JobCommand("doctor", ("doctor",)), package, environment, with_key=with_key)
        assert ("key" in sent) == with_key == (secrets.PLACE in sent[-1]["runtime_env"]["env_vars"])
        assert sent[-1]["runtime_env"]["env_vars"].get("WANDB_MODE") == (None if with_key else "online")
        assert os.environ["WANDB_API_KEY"] not in str(sent)
