"""The command of a job, its address and its end; without a cluster."""

import socket
from pathlib import Path

import pytest
from ray.job_submission import JobDetails
from rich.console import Console

from experiments.custom.own_imports import ROOT
from launch.jobs import start
from launch.jobs.client import JobError, address_of, is_dashboard
from launch.jobs.follow import copy_line, report_end
from launch.jobs.package import copy_checkout
from launch.jobs.submit import JobCommand, JobRequest, _check_names, job_command, send
from launch.node_probe import pinned_versions
from suite.errors import SettingError, SuiteError
from tests.launch.test_run import OWN


def test_the_arguments_of_a_job_are_those_of_the_command_that_it_runs():
    assert job_command(JobRequest("t128_6b", "laptop", "train.steps=5")).arguments == (
        "experiment", "t128_6b", "--scale", "laptop", "--set", "train.steps=5",
    )  # fmt: skip
    sweep = job_command(JobRequest("depth_width"))
    assert sweep.arguments == ("sweep", "depth_width", "--scale", "auto", "--launcher", "ray")
    resumed = job_command(JobRequest("t128_6b", run="t/20260101-000000"))
    assert resumed.arguments == ("resume", "t/20260101-000000")


def test_settings_that_only_the_paper_scale_takes_are_sent_unless_a_small_scale_is_asked_for():
    settings = "train.profile_steps=1000-1001"
    assert job_command(JobRequest("t128_6b", settings=settings)).arguments[-1] == settings
    with pytest.raises(SettingError, match="profile_steps"):
        job_command(JobRequest("t128_6b", "laptop", settings))
    with pytest.raises(SettingError, match="validate_evry"):
        job_command(JobRequest("t128_6b", settings="train.validate_evry=1000"))


def test_a_job_gets_an_experiment_of_a_file_that_git_tracks(tmp_path):
    text = job_command(JobRequest(f"{ROOT}/examples/language_model.py:text", settings="train.steps=5"))
    assert text.name == "text"
    assert text.arguments[:2] == ("experiment", "examples/language_model.py:text")


def test_a_job_gets_a_file_from_anywhere_with_what_it_imports(tmp_path):
    (tmp_path / "own.py").write_text("from parts.helper import text\nimport key\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").touch()
    (tmp_path / "other.py").touch()
    (tmp_path / "parts/helper.py").write_text(OWN.replace("def small", "def text"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/key.py").touch()
    (tmp_path / "key.py").symlink_to("elsewhere/key.py")
    (tmp_path / "secret.txt").write_text("")
    command = job_command(JobRequest(f"{tmp_path}/own.py:text", settings="train.steps=5"))
    assert command.arguments[:2] == ("experiment", "own/own.py:text")
    resumed = job_command(JobRequest(f"{tmp_path}/own.py:text", run="text/1"))
    assert (resumed.arguments, resumed.own) == (("resume", "text/1"), command.own)
    assert command.source == resumed.source == f"{tmp_path}/own.py:text"
    said = []
    package = tmp_path / "package"
    copy_checkout(ROOT, package, said.append, own=command.own)
    names = sorted(str(path.relative_to(package)) for path in package.glob("own/**/*.*"))
    assert names == ["own/own.py", "own/parts/__init__.py", "own/parts/helper.py"]
    assert f"{tmp_path}/own.py and 2 files that it imports are packed, too; data beside it is not" in said


def test_a_job_inherits_the_mode_of_wandb_but_no_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "")
    sent = []

    class Listener:
        address, ray = "http://127.0.0.1:8265", "ray"

        def submit_job(self, **job):
            sent.append(job)

    send(Listener(), "j", JobCommand("t128_6b", ("experiment", "t128_6b")), Path("package"), "/s", {})
    (job,) = sent
    assert job["runtime_env"]["env_vars"]["WANDB_MODE"] == "online"
    assert 40 * "0" not in str(job)


@pytest.mark.parametrize(
    ("submission", "part"),
    [
        (JobRequest("t128_6"), "there is no experiment t128_6; did you mean t128_6b"),
        (JobRequest("t128_6b", settings="train.step=5"), "train.step"),
        (JobRequest("t128_6b", "laptp"), "unknown scale 'laptp'"),
        (JobRequest("t128_6b", "paper", "train.steps=x"), "train.steps"),
        (JobRequest("depth_width", settings="train.steps=5"), "takes no settings"),
        (JobRequest("depth_width", "huge"), "has no scale 'huge'"),
        (JobRequest("", run="a b"), "--run 'a b'"),
    ],
)
def test_a_command_that_no_cluster_can_run_is_rejected(submission, part):
    with pytest.raises(SuiteError, match=part.replace("?", r"\?")):
        job_command(submission)


def test_the_address_of_a_dashboard_is_completed_or_rejected(monkeypatch):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(JobError, match="which cluster"):
        address_of("")
    with pytest.raises(JobError, match="is not a dashboard address"):
        address_of("ray://head:10001")
    assert address_of("head:8265/") == "http://head:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://other:1")
    assert (address_of(""), address_of("http://head:8265")) == ("https://other:1", "http://head:8265")


def test_a_port_without_a_dashboard_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert not is_dashboard(address)
    assert not is_dashboard("")
    assert is_dashboard(f"http://{address}")


@pytest.mark.parametrize(
    ("node", "code", "part"),
    [
        (None, None, "could not be started: no room"),
        ("ab", None, "was lost.*no room"),
        ("ab", -9, r"job j ended early: its process was killed \(signal 9\); .*resume its run"),
    ],
)
def test_the_end_of_a_job_that_never_started_lost_its_supervisor_or_was_killed_is_one_sentence(node, code, part):
    details = JobDetails(
        type="SUBMISSION", submission_id="j", status="FAILED", entrypoint="x", message="no room", driver_node_id=node,
        driver_exit_code=code,
    )  # fmt: skip
    with pytest.raises(JobError, match=part):
        report_end(details, Console())


def test_the_page_is_brought_by_what_reaches_the_node(tmp_path):
    assert copy_line("head-1 (10.0.0.1)", "/s/a b/report.html") == "scp '10.0.0.1:/s/a b/report.html' ."
    assert copy_line("head-1 (namespace ray)", "/s/report.html") == "kubectl cp ray/head-1:/s/report.html report.html"
    here = f"{socket.gethostname()} (10.0.0.1)"
    assert copy_line(here, f"{tmp_path}/report.html") == f"cp {tmp_path}/report.html ."
    assert copy_line(here, "/not/here/report.html").startswith("scp 10.0.0.1:")


def test_an_invalid_job_name_or_storage_is_rejected():
    for job, storage in (("a/b", ""), ("-a", ""), ("", "relative/folder"), ("", "s3://bucket/x")):
        with pytest.raises(SettingError):
            _check_names(job, storage)
    _check_names("run-1.a_b", "/shared")


def test_all_nodes_with_a_wrong_version_are_named(monkeypatch):
    nodes = [{"NodeID": name, "NodeManagerHostname": f"host-{name}"} for name in "abc"]
    right = pinned_versions()
    answers = {"a": right, "b": right | {"wandb": "0.1"}, "c": right | {"wandb": "0.1", "ray": None}}
    monkeypatch.setattr(start, "alive_nodes", lambda: nodes)
    monkeypatch.setattr(start, "start_on", lambda node, *_: node)
    monkeypatch.setattr(start, "collect", lambda calls, seconds: (answers, {}))
    pip = f"on each node, or in its image: pip install ray=={right['ray']} wandb=={right['wandb']}"
    assert start._wrong_versions() == f"ray missing on host-c, wandb 0.1 on host-b, host-c; {pip}"
