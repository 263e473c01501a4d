"""What the client of a cluster says about one that cannot take a job; without Ray."""

import http.server
import json
import threading

import pytest
import ray

from launch.jobs import client
from launch.jobs.client import JobClient, JobError, UnreachableError


class Dashboard(http.server.BaseHTTPRequestHandler):
    """Answers every request with this status code and text."""

    code, text = 200, ""

    def do_GET(self):
        self.send_response(self.code)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_):
        """Says nothing."""


@pytest.fixture
def dashboard(monkeypatch, tmp_path):
    """A function that lets a dashboard answer with this status code and text; returns its address."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("HOME", str(tmp_path))
    with http.server.HTTPServer(("127.0.0.1", 0), Dashboard) as server:

        def answering(code, text):
            Dashboard.code, Dashboard.text = code, text
            return f"http://127.0.0.1:{server.server_port}"

        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield answering
        server.shutdown()
        thread.join()


def test_a_head_of_another_ray_version_is_refused_with_both_versions_and_the_pip_command(dashboard):
    answer = {"version": "4", "ray_version": "2.1.0", "ray_commit": "x", "session_name": "s"}
    wanted = ray.__version__
    with pytest.raises(
        JobError, match=rf"runs Ray 2\.1\.0, this machine Ray {wanted}; .*pip install 'ray.*=={wanted}'"
    ):
        JobClient(dashboard(200, json.dumps(answer)))


@pytest.mark.parametrize(("code", "text"), [(404, "nothing here"), (200, "<html>")])
def test_another_server_is_not_taken_for_a_cluster(dashboard, code, text):
    with pytest.raises(UnreachableError, match="is not a Ray dashboard"):
        JobClient(dashboard(code, text))


@pytest.mark.parametrize("has_token", [False, True])
def test_rays_command_line_is_told_to_use_the_token_that_it_would_not_look_for(dashboard, monkeypatch, has_token):
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(client, "maybe_enable_token_auth_if_token_available", lambda **_: has_token)
    answer = {"version": "4", "ray_version": ray.__version__, "ray_commit": "x", "session_name": "s"}
    assert JobClient(dashboard(200, json.dumps(answer))).ray == ("RAY_AUTH_MODE=token ray" if has_token else "ray")


def test_no_cluster_at_an_address_is_one_sentence(dashboard):
    with pytest.raises(UnreachableError, match=r"no Ray cluster answers at http://127.0.0.1:9 \(no connection\)"):
        JobClient("http://127.0.0.1:9")
