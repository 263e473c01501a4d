"""Whether a cluster requires a token; without Ray."""

import http.server
import threading

import pytest

from launch.jobs.client import JobClient, UnreachableError


@pytest.fixture
def dashboard():
    """Returns a function that gives a client of a dashboard that answers with a status code without a token."""
    served = []

    def answering(code):
        class Dashboard(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.headers.get("authorization") else code)
                self.end_headers()

            def log_message(self, *_):
                """Says nothing."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Dashboard)
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


@pytest.mark.parametrize(("code", "asks"), [(200, False), (401, True), (403, True)])
def test_a_cluster_that_rejects_a_request_without_a_token_asks_for_one(dashboard, code, asks):
    assert dashboard(code).asks_for_token() is asks


def test_a_cluster_that_does_not_say_whether_it_asks_is_one_sentence(dashboard):
    client = dashboard(200)
    client.address = client._address = "http://127.0.0.1:9"
    with pytest.raises(UnreachableError, match=r"cannot find out whether .* requires a token"):
        client.asks_for_token()
