"""Uploading offline records: which parts are uploaded, and the errors."""

import http.server
import json
import os
import re
import threading
import time

import filelock
import pytest

from launch.runs.store import RunFolder
from launch.tracking import wandb_sync
from suite.settings import TrackingSettings
from suite.training.wandb_run import Identity, Wandb
from tests.launch.command_line import call
from tests.marks import slow_but_for

WITH_KEY = {"WANDB_API_KEY": 40 * "0"}


@pytest.fixture
def place(tmp_path):
    """Three runs: with two parts, one part and none."""
    for name, id, parts in (("t12", "1", 2), ("t24", "1", 1), ("t24", "2", 0)):
        run = tmp_path / "runs" / name / id
        run.mkdir(parents=True)
        (run / "experiment.toml").touch()
        for part in range(parts):
            folder = run / "wandb" / f"offline-run-2026112{part}_000000-{name}{id}"
            folder.mkdir(parents=True)
            (folder / f"run-{name}{id}.wandb").touch()
    return tmp_path


def synced(folder, *arguments, **variables):
    """Returns the exit code of ``gpipe sync`` and its output; wandb reads its settings as in a new process."""
    import wandb

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": str(folder), "WANDB_API_KEY": "", **variables}.items():
            patch.setenv(name, value)
        wandb.teardown()
        code, out, errors = call("sync", *arguments, folder=folder)
        wandb.teardown()
    return code, " ".join((out + errors).split())


def test_a_missing_key_and_an_unreachable_server_are_reported(place):
    code, said = synced(place, WANDB_BASE_URL="http://wandb.example.org")
    assert code == 2
    assert said.startswith("error: there is no key for http://wandb.example.org; 2 runs are waiting to be uploaded")
    for server, reason in (("http://127.0.0.1:9", ".*refused"), ("nowhere", ", or WANDB_BASE_URL is no URL")):
        code, said = synced(place, "t12/1", WANDB_BASE_URL=server, **WITH_KEY)
        assert code == 2
        assert re.match(f"error: wandb's server does not answer in 10 s{reason}", said)


def test_parts_that_wandb_has_marked_are_not_uploaded_again(place):
    assert synced(place, "t24/2") == (0, "nothing to upload for run t24/2")
    run = RunFolder(place / "runs" / "t12" / "1")
    first, second = wandb_sync.unsynced_parts(run)
    assert first.parent.name < second.parent.name
    (first.parent / "run-t121.wandb.synced").touch()
    assert wandb_sync.unsynced_parts(run) == [second]


class Server(http.server.ThreadingHTTPServer):
    """A minimal wandb server for uploads: stores the steps of each run, and rejects those of one."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.steps = {}
        self.groups = {}
        self.refused = ""

    def answer(self, name, given):
        """Answers one query, by its name."""
        run = given.get("name")
        if name == "RunResumeStatus":
            known = {
                "id": run, "name": run, "historyLineCount": len(self.steps.get(run, [])), "eventsLineCount": 0,
                "logLineCount": 0, "historyTail": json.dumps([json.dumps({"_step": len(self.steps.get(run, [])) - 1})]),
                "eventsTail": "[]", "summaryMetrics": "{}", "config": "{}", "tags": [], "wandbConfig": '{"t": 1}',
            }  # fmt: skip
            bucket = known if run in self.steps else None
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}, "bucket": bucket}}
        if name == "UpsertBucket":
            self.steps.setdefault(run, [])
            self.groups.setdefault(run, given.get("groupName"))
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": run, "name": run, "displayName": run, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.address}/files"} for file in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        return {}


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    def log_message(self, *_):
        """Says nothing."""

    def do_GET(self):
        self._reply(404, {})

    def do_PUT(self):
        self._body()
        self._reply(200, {})

    def do_POST(self):
        body = json.loads(self._body())
        if self.path.endswith("/file_stream"):
            steps = self.server.steps[self.path.split("/")[-2]]
            if lines := body.get("files", {}).get("wandb-history.jsonl"):
                steps[lines["offset"] :] = [json.loads(line)["step"] for line in lines["content"]]
            self._reply(200, {})
        elif body.get("variables", {}).get("name") == self.server.refused:
            self._reply(403, {"errors": [{"message": "this run is not yours"}]})
        else:
            self._reply(200, {"data": self.server.answer(body["operationName"], body.get("variables") or {})})

    def _body(self):
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _reply(self, code, content):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    """A fake wandb server on this machine."""
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def recorded(run, id, *parts):
    """Records a run's parts offline; each is given by its steps."""
    run.mkdir(parents=True)
    (run / "experiment.toml").touch()
    for steps in parts:
        identity = Identity.read(run) or Identity("p", id, "twos", (), id)
        tracker = Wandb(run, TrackingSettings(wandb="offline"), identity, {}, pytest.fail)
        for step in steps:
            tracker.log(step, {"train/loss": 1.0 / step})
        tracker.finish({})
        if steps is not parts[-1]:
            time.sleep(1.1)  # wandb names a part by the second


@pytest.mark.parametrize("kept", slow_but_for([3000], [7, 3000]))  # wandb's header alone, some of the steps
def test_the_complete_steps_of_a_part_whose_writer_was_killed_are_uploaded_once(tmp_path, server, kept):
    run = tmp_path / "runs" / "t12" / "1"
    recorded(run, "one", list(range(1, 31)), [1, 2])
    first, _ = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert first.stat().st_size > 2 * kept
    os.truncate(first, kept)
    code, said = synced(tmp_path, WANDB_BASE_URL=server.address, **WITH_KEY)
    assert (code, said) == (0, "t12/1: 2 parts uploaded")
    assert synced(tmp_path, WANDB_BASE_URL=server.address, **WITH_KEY) == (0, "nothing to upload for any run in runs")
    steps = server.steps["one"]
    assert steps[-2:] == [1, 2]
    assert steps[:-2] == list(range(1, len(steps) - 1))
    assert (0 < len(steps) - 2 < 30) == (kept == 3000)
    assert wandb_sync.unsynced_parts(RunFolder(run)) == []


@pytest.mark.parametrize(
    ("code", "more", "left"), [(1, "", 0), (None, "", 1), (1, "Post http://s/graphql: dial tcp: connection refused", 1)]
)
def test_an_incomplete_part_whose_upload_failed_stays_to_be_uploaded(place, monkeypatch, code, more, left):
    run = RunFolder(place / "runs" / "t24" / "1")

    def cut(command, run, limit_s, **variables):
        run.wandb_log.write_text(f"{more}\nwandb: ERROR {wandb_sync.TORN[0]}\n")
        return code

    monkeypatch.setattr(wandb_sync, "run_logged", cut)  # no real server is lost at just that moment
    (part,) = wandb_sync.unsynced_parts(run)
    assert bool(wandb_sync._upload(run, part)) == (left == 1)
    assert len(wandb_sync.unsynced_parts(run)) == left


@pytest.mark.slow
def test_a_resumed_run_becomes_one_wandb_run_and_failures_are_reported(tmp_path, server):
    runs = tmp_path / "runs" / "t12"
    recorded(runs / "1", "one", [1, 2, 3], [3, 4])
    recorded(runs / "2", "two", [1])
    recorded(runs / "3", "three", [1])
    server.refused = "two"
    there = {"WANDB_BASE_URL": server.address, **WITH_KEY}
    with filelock.FileLock(runs / "3" / "lock"):
        code, said = synced(tmp_path, **there)
    assert code == 2
    assert "t12/1: 2 parts uploaded t12/2: failed t12/3: it is being trained or scored: skipped" in said
    assert "error: 1 of 3 runs were not uploaded; t12/2: " in said
    assert server.steps == {"one": [1, 2, 3, 3, 4]}
    assert server.groups == {"one": "twos"}
    server.refused = ""
    code, said = synced(tmp_path, **there)
    assert code == 0, said
    assert "t12/1" not in said
    assert server.steps == {"one": [1, 2, 3, 3, 4], "two": [1], "three": [1]}
    assert [wandb_sync.unsynced_parts(RunFolder(runs / id)) for id in "123"] == [[], [], []]
