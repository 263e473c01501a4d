"""What a submission is made of, without a cluster: the package, what a probe says, the archive that comes back."""

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.job_submission import JobDetails
from rich.console import Console

from launch.jobs import remote_archive, remote_probe
from launch.jobs.client import JobError, address_of, is_dashboard
from launch.jobs.fetch import read_archive, unpack
from launch.jobs.logs import report_end
from launch.jobs.preflight import judge
from launch.jobs.requirements import pinned_requirements
from launch.jobs.source_package import checkout, pack
from launch.jobs.submit import job_command
from launch.jobs.upload import CopyError, UploadThread
from launch.runs.store import CACHE, SHARED_CACHE, run_lock
from launch.tracking.progress import Bar, MarkedLines, Update, read_update
from suite.errors import SettingError, SuiteError

PINS = {"torch": "2.13.0", "rich": "15.0.0"}


def git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """A checkout with two tracked files, one ignored and one unknown to git."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("a = 1\n")
    (root / "sub" / "b.py").write_text("b = 1\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "big.log").write_bytes(b"x" * 100)
    return root


def test_tracked_files_go_as_they_are_and_the_rest_stays(tree, tmp_path):
    first = pack(tree, tmp_path / "one.zip")
    assert first.lines[0].startswith("package: 3 tracked files, 0.00 MiB, commit ")
    assert len(first.lines) == 1
    (tree / "a.py").write_text("a = 2\n")
    (tree / "notes.txt").write_text("mine")
    with (tree / "dump.bin").open("wb") as file:
        file.truncate(11 * 2**20)
    second = pack(tree, tmp_path / "two.zip")
    assert second.lines[1:] == (
        "1 of them have uncommitted changes, which are included: a.py",
        "not packed, because git does not track them: 2 files, 11.00 MiB; large: dump.bin (11.00 MiB)",
    )
    with zipfile.ZipFile(second.archive) as file:
        assert sorted(file.namelist()) == [".gitignore", "a.py", "sub/b.py"]
        assert file.read("a.py") == b"a = 2\n"


def test_the_same_files_make_the_same_archive(tree, tmp_path):
    pack(tree, tmp_path / "one.zip")
    os.utime(tree / "a.py", (1, 1))
    pack(tree, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_a_package_over_the_limit_names_its_largest_files(tree, tmp_path):
    (tree / "weights.bin").write_bytes(os.urandom(5000))
    git(tree, "add", "-A")
    with pytest.raises(JobError, match=r"Ray accepts at most 0.00 MiB; its largest files are weights.bin \(0.00 MiB\)"):
        pack(tree, tmp_path / "one.zip", limit=4000)


def test_outside_of_a_checkout_it_is_said_what_to_do(tmp_path):
    with pytest.raises(JobError, match=r"is not a git checkout .* submit from a clone, or run git init"):
        pack(tmp_path, tmp_path / "one.zip")


def test_the_pins_are_those_of_what_a_run_needs_and_not_of_development():
    found = pinned_requirements(checkout())
    assert found["torch"] == "2.13.0"
    assert "aiohttp" in found  # which ray[default] needs, and plain ray does not
    assert not {"pytest", "mypy", "ruff"} & set(found)


def node(**changes):
    told = {"host": "n", "address": "10.0.0.1", "python": "3.11.9", "differ": {}, "shared": True, "fault": ""}
    return told | changes


def seen(*nodes, **changes):
    told = {"python": "3.11.2", "executable": "/v/bin/python", "storage": "/s", "home": "/h", "fault": "", "differ": {}}
    return told | {"nodes": list(nodes or [node()])} | changes


def test_a_cluster_that_has_everything_gets_nothing_installed():
    ground = judge(seen(node(), node()), PINS, "/s", "3.11.7")
    assert (ground.nodes, ground.storage, ground.python, ground.install) == (2, "/s", "/v/bin/python", {})
    assert ground.lines[0] == "all 2 pinned packages are installed on the cluster"


def test_what_differs_on_any_node_is_installed_by_its_pin_and_told():
    ground = judge(seen(node(), node(differ={"rich": "14.0.0", "torch": None})), PINS, "/s", "3.11.7")
    assert ground.install["pip"]["packages"] == ["rich==15.0.0", "torch==2.13.0"]
    assert ground.python == "python"
    assert "each node first installs 2 packages" in ground.lines[0]
    assert "rich 15.0.0 (found: 14.0.0), torch 2.13.0 (found: none)" in ground.lines[0]


def test_a_url_keeps_checkpoints_and_copies_and_the_heads_folder_the_run():
    ground = judge(seen(storage="s3://b/x"), PINS, "s3://b/x", "3.11.7")
    assert (ground.storage, ground.url) == ("/h", "s3://b/x")
    assert "s3://b/x" in ground.lines[1]
    assert (
        job_command("t128_6b", "auto", "", "", "s3://b/x/").command[-1] == "train.checkpoint_dir=s3://b/x/checkpoints"
    )


def test_a_job_uses_the_cache_here_where_the_head_and_all_nodes_see_it(tmp_path):
    ours = judge(seen(node(cache=True), node(cache=True), cache=True), PINS, "/s", "3.11.7")
    assert ours.cache == str(CACHE.resolve())
    assert f"cache: {ours.cache}, shared with the head and all nodes" in ours.lines[2]
    for told in (seen(node(cache=True), node(cache=False), cache=True), seen(node(cache=True), cache=False)):
        assert judge(told, PINS, "/s", "3.11.7").cache == ""
    (tmp_path / "marker").touch()
    assert remote_probe.probe_cluster({}, "", "", "", str(tmp_path / "marker"))["cache"]
    assert not remote_probe.probe_cluster({}, "", "", "", str(tmp_path / "other"))["cache"]
    variables = {**os.environ, "GPIPE_STORAGE": "/s", SHARED_CACHE: str(tmp_path)}
    code = "from launch.runs.store import CACHE; print(CACHE)"
    found = subprocess.run([sys.executable, "-c", code], cwd=checkout(), env=variables, capture_output=True, text=True)
    assert found.stdout == f"{tmp_path}\n", found.stderr


def test_a_runs_files_are_copied_to_a_url_once_until_they_change(tmp_path):
    run, notes = tmp_path / "runs" / "t" / "1", tmp_path / "notes"
    copies = UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there")
    assert copies.copy() == 0
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    for name in ("record.json", "logs/a.log", "checkpoints/weights"):
        (run / name).write_text("one")
    notes.write_text(f"{run}\n{run}\n")
    assert [copies.copy(), copies.copy()] == [2, 0]
    (run / "logs" / "a.log").write_text("one, two")
    assert copies.copy() == 1
    there = tmp_path / "there" / "runs" / "t" / "1"
    assert {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()} == {
        "record.json": "one", "logs/a.log": "one, two",
    }  # fmt: skip


@pytest.fixture
def as_nobody(tmp_path):
    """Makes this process one that may not read everything, and its folder one that it may write."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder == Path(tempfile.gettempdir()):
            break
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_copied(tmp_path, as_nobody):
    run, notes, there = tmp_path / "runs/t/1", tmp_path / "notes", tmp_path / "there/runs/t/1"
    run.mkdir(parents=True)
    notes.write_text(f"{run}\n")
    for name in ("a.log", "b.log", "c.log"):
        (run / name).write_text(name)
    (run / "a.log").chmod(0)
    copies = UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there")
    for _ in range(2):
        with pytest.raises(CopyError, match=r"1 of its files cannot be read: .*a\.log.*; all others are copied"):
            copies.copy()
        assert sorted(path.name for path in there.iterdir()) == ["b.log", "c.log"]
    (run / "a.log").chmod(0o600)
    assert copies.copy() == 1


def refusing(tmp_path, names, refused):
    """Returns the copies of a run with these files, and where they go: a store that takes no file of those names."""
    run, notes, there = tmp_path / "runs/t/1", tmp_path / "notes", tmp_path / "there/runs/t/1"
    run.mkdir(parents=True)
    notes.write_text(f"{run}\n")
    for name in names:
        (run / name).write_text(name)
    for name in refused:
        (there / name).mkdir(parents=True)
    return UploadThread(tmp_path / "runs", notes, f"file://{tmp_path}/there"), there


def test_files_that_the_store_refuses_keep_no_other_from_being_copied(tmp_path):
    copies, there = refusing(tmp_path, "abcde", "bd")
    for _ in range(2):
        with pytest.raises(CopyError, match=r"refused 2 of its files: .*/b: .*; all others are copied"):
            copies.copy()
        assert [(there / name).is_file() for name in "abcde"] == [True, False, True, False, True]
    for name in "bd":
        (there / name).rmdir()
    assert copies.copy() == 2


def test_a_store_that_takes_nothing_is_asked_three_times_and_the_refused_go_last(tmp_path):
    copies, there = refusing(tmp_path, "abcdef", "abce")
    with pytest.raises(CopyError, match=r"refused 3 of its files: .*/a: .*; the rest waits for the next copy"):
        copies.copy()
    assert not (there / "d").exists()
    with pytest.raises(CopyError, match=r"refused 4 of its files: .*/e: "):
        copies.copy()
    assert (there / "d").is_file()
    assert (there / "f").is_file()


@pytest.mark.parametrize(
    ("told", "storage", "parts"),
    [
        (seen(node(python="3.12.1")), "/s", [r"n \(10.0.0.1\) runs Python 3.12.1, this machine Python 3.11.7"]),
        (seen(python="3.10.4"), "/s", ["the head runs Python 3.10.4"]),
        (seen(node(), node(), storage=""), "", ["the cluster has 2 nodes", "give STORAGE="]),
        (seen(node(), node(host="m", shared=False)), "/s", ["not the same folder", "1 of 2", r"m \(10.0.0.1\)"]),
        (seen(node(fault="OSError: full")), "/s", [r"node n \(10.0.0.1\) cannot write to storage /s: OSError: full"]),
        (seen(fault="OSError: read-only"), "/s", ["the head cannot write to storage /s: OSError: read-only"]),
        (
            seen({"host": "m", "address": "b", "fault": "did not answer"}),
            "/s",
            [r"node m \(b\) cannot be used", "answer"],
        ),
    ],
)
def test_what_would_end_a_run_there_is_told_here(told, storage, parts):
    with pytest.raises(JobError) as refused:
        judge(told, PINS, storage, "3.11.7")
    for part in parts:
        refused.match(part)


def test_a_probe_tells_versions_that_differ_and_markers_that_it_sees(tmp_path):
    found = remote_probe.versions(
        {"rich": "0.0.1", "no-such-package": "1", "torch": pinned_requirements(checkout())["torch"]}
    )
    assert set(found) == {"rich", "no-such-package"}  # torch's +cpu is no other version
    assert found["no-such-package"] is None
    (tmp_path / "theirs").mkdir()
    said = remote_probe.reason(ImportError("Install s3fs to access S3"))
    assert said.startswith("its library is missing: Install s3fs to access S3, on every node")
    missing = remote_probe.probe_cluster({}, str(tmp_path / "ours"), "mark", "mine")
    assert missing["fault"] == remote_probe.MISSING
    assert not (tmp_path / "ours").exists()
    (tmp_path / "ours").mkdir()
    remote_probe.put(str(tmp_path / "ours"), "mark")
    told = remote_probe.probe_cluster({}, str(tmp_path / "ours"), "mark", "mine")
    assert (told["shared"], told["fault"]) == (True, "")
    assert remote_probe.exists(str(tmp_path / "ours"), "mine")
    assert not remote_probe.probe_cluster({}, str(tmp_path / "theirs"), "mark", "mine")["shared"]
    for name in ("mark", "mine", "never"):
        remote_probe.remove(str(tmp_path / "ours"), name)
    assert not list((tmp_path / "ours").iterdir())


A, B = 56 * "a", 56 * "b"


class Result:
    """The future of a task."""

    def __init__(self, node):
        self.node = node


@pytest.fixture
def failing_node(monkeypatch):
    """Asks a cluster whose node A answers with errors; returns the answers and the nodes that were asked."""
    errors, calls = [], []

    class Task:
        def options(self, scheduling_strategy, **_):
            self.node = scheduling_strategy.node_id
            return self

        def remote(self, *_):
            calls.append(self.node)
            return Result(self.node)

    def get(result, timeout):
        if result.node == A and errors:
            raise errors.pop(0)
        return {"fault": ""}

    monkeypatch.setattr(ray, "remote", lambda _: Task())
    monkeypatch.setattr(ray, "wait", lambda results, num_returns, timeout: (results[:1], results[1:]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": True} for node in (A, B)])
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", dict)
    monkeypatch.setattr(remote_probe, "RETRY_S", 0.01)

    def ask(*given):
        errors.extend(given)
        alive = [{"NodeID": node, "NodeManagerHostname": node, "Resources": {"CPU": 2}} for node in (A, B)]
        return remote_probe.ask(alive, dict.fromkeys([A, B], ())), calls

    return ask


def test_a_node_that_fails_three_times_in_the_same_way_is_not_asked_again(failing_node):
    answers, calls = failing_node(*(OSError() for _ in range(9)))  # an error without a text
    assert (calls.count(A), calls.count(B)) == (3, 1)
    assert "failed there 3 times in the same way: OSError; Ray lists it as alive" in answers[A]["fault"]
    with pytest.raises(JobError, match=r"node a+ .* cannot be used: the probe failed there 3 times"):
        judge(seen(answers[A] | {"address": "x"}), PINS, "/s", "3.11.7")


def test_a_node_whose_errors_differ_is_asked_on(failing_node):
    answers, calls = failing_node(OSError("one"), OSError("two"), OSError("one"), OSError("one"))
    assert calls.count(A) == 5
    assert answers == {A: {"fault": ""}, B: {"fault": ""}}


def archive(tmp_path, capsys):
    """Returns what the cluster prints for a job with one run."""
    run = tmp_path / "storage" / "runs" / "t" / "1"
    for name in (
        "record.json",
        "logs/stage-0-0.log",
        "checkpoints/5/manifest.json",
        "model.safetensors",
        "lock",
        "hf.lock",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    notes = tmp_path / "storage" / "jobs" / "j"
    notes.parent.mkdir()
    notes.write_text(f"{run}\n{run}\n")
    remote_archive.main({"storage": str(tmp_path / "storage"), "job": "j", "beside": ["sweep"], "limit": 10**6})
    return capsys.readouterr().out


def test_an_archive_comes_back_whole_without_checkpoints(tmp_path, capsys):
    head, packed = read_archive("a line of Ray's\n" + archive(tmp_path, capsys))
    source = {"job": "j", "address": "a"}
    for _ in range(2):
        unpack(packed, head["folders"], tmp_path / "runs", source)
        found = {str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
        assert found == {"t/1/record.json", "t/1/logs/stage-0-0.log", "t/1/fetched.json"}
    unpack(packed, head["folders"], tmp_path / "runs", source | {"job": "k"})  # that went on with the run
    with pytest.raises(JobError, match="already exists and was not fetched from the cluster at b"):
        unpack(packed, head["folders"], tmp_path / "runs", source | {"address": "b"})


def test_storage_behind_a_symbolic_link_is_packed_by_the_runs_own_names(tmp_path, capsys):
    """A run notes where it really is; the job knows its storage by the name that was given."""
    real, link = tmp_path / "disk" / "storage", tmp_path / "storage"
    run = real / "runs" / "t" / "1"
    for path in (run / "record.json", real / "runs" / "sweep-tiny" / "report.md", real / "jobs" / "j"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{run}\n")
    link.symlink_to(real)
    remote_archive.main({"storage": str(link), "job": "j", "beside": ["sweep-tiny"], "limit": 10**6})
    head, packed = read_archive(capsys.readouterr().out)
    assert head["folders"] == ["t/1", "sweep-tiny"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "mine")
    unpack(packed, head["folders"], tmp_path / "runs", {"job": "j", "address": "a"})
    assert (tmp_path / "mine" / "t" / "1" / "record.json").exists()


def test_a_folder_that_is_noted_and_lies_elsewhere_is_not_packed(tmp_path, capsys):
    (tmp_path / "private").mkdir()
    (tmp_path / "storage" / "jobs").mkdir(parents=True)
    (tmp_path / "storage" / "jobs" / "j").write_text(f"{tmp_path / 'private'}\n")
    with pytest.raises(SystemExit):
        remote_archive.main({"storage": str(tmp_path / "storage"), "job": "j", "beside": [], "limit": 10**6})
    assert "private lies outside of" in capsys.readouterr().out


def test_what_wandb_recorded_of_a_run_in_training_stays_until_it_has_ended(tmp_path, capsys):
    """Its last part is not whole, and what is uploaded of it now would be missing or doubled later."""
    part = tmp_path / "storage/runs/t/1/wandb/offline-run-x/run-x.wandb"
    part.parent.mkdir(parents=True)
    part.write_text("steps")
    with run_lock(tmp_path / "storage/runs/t/1"):
        head, packed = read_archive(archive(tmp_path, capsys))
    assert (head["training"], files_in(packed)) == (["t/1"], {"t/1/record.json", "t/1/logs/stage-0-0.log"})
    (tmp_path / "storage/jobs/j").unlink()
    (tmp_path / "storage/jobs").rmdir()
    head, packed = read_archive(archive(tmp_path, capsys))
    assert (head["training"], len(files_in(packed))) == ([], 3)


def files_in(packed):
    with tarfile.open(fileobj=io.BytesIO(packed)) as file:
        return set(file.getnames())


def test_a_torn_or_damaged_archive_is_refused(tmp_path, capsys):
    lines = archive(tmp_path, capsys).splitlines()
    with pytest.raises(JobError, match="is incomplete"):
        read_archive("\n".join(lines[:-1]))
    with pytest.raises(JobError, match="is damaged"):
        read_archive("\n".join([lines[0], "A" + lines[1][1:], *lines[2:]]))
    with pytest.raises(JobError, match="is damaged: 0 of"):
        read_archive("\n".join([lines[0], "?", *lines[2:]]))


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "t/1/../../../out", "t/2/record.json"])
def test_an_archive_that_leads_out_of_its_runs_writes_nothing(tmp_path, name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.addfile(tarfile.TarInfo("t/1/good"), io.BytesIO())
        file.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(JobError, match="nothing was unpacked"):
        unpack(buffer.getvalue(), ["t/1"], tmp_path / "runs", {"job": "j", "address": "a"})
    with pytest.raises(JobError, match="nothing was unpacked"):
        unpack(buffer.getvalue(), ["../t"], tmp_path / "runs", {"job": "j", "address": "a"})
    assert not list(tmp_path.rglob("*"))


def test_what_is_submitted_is_the_command_line_of_an_own_run():
    assert job_command("t128_6b", "laptop", "train.steps=5", "").command == (
        "experiment", "t128_6b", "--scale", "laptop", "--set", "train.steps=5",
    )  # fmt: skip
    sweep = job_command("depth_width", "auto", "", "")
    assert sweep.command == ("sweep", "depth_width", "--scale", "auto", "--launcher", "ray")
    assert sweep.environment == ("depth_width-laptop",)
    assert job_command("t128_6b", "auto", "", "t/20260101-000000").command == ("resume", "t/20260101-000000")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("t128_6", "auto", "", ""), "no experiment or sweep is called t128_6; did you mean t128_6b"),
        (("t128_6b", "laptp", "", ""), "unknown scale 'laptp'"),
        (("t128_6b", "auto", "train.step=5", ""), "train.step"),
        (("t128_6b", "paper", "train.steps=x", ""), "train.steps"),
        (("depth_width", "auto", "train.steps=5", ""), "takes no settings"),
        (("depth_width", "huge", "", ""), "has no scale 'huge'"),
        (("", "auto", "", "a b"), "RUN='a b'"),
    ],
)
def test_what_cannot_be_run_anywhere_is_told_before_anything_else(arguments, part):
    with pytest.raises(SuiteError, match=part.replace("?", r"\?")):
        job_command(*arguments)


def test_an_address_is_a_dashboards(monkeypatch):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(JobError, match="which cluster"):
        address_of("")
    with pytest.raises(JobError, match="is not a dashboard address"):
        address_of("ray://head:10001")
    assert address_of("head:8265/") == "http://head:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://other:1")
    assert (address_of(""), address_of("http://head:8265")) == ("https://other:1", "http://head:8265")


def test_a_port_that_is_no_dashboards_is_none():
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = f"127.0.0.1:{one.getsockname()[1]}"
    assert not is_dashboard(address)
    assert not is_dashboard("")
    assert is_dashboard(f"http://{address}")


@pytest.mark.parametrize(("node", "part"), [(None, "could not be started: no room"), ("ab", "was lost.*no room")])
def test_a_job_without_an_exit_code_never_began_or_lost_who_watched_it(node, part):
    details = JobDetails(
        type="SUBMISSION", submission_id="j", status="FAILED", entrypoint="x", message="no room", driver_node_id=node
    )  # fmt: skip
    with pytest.raises(JobError, match=part):
        report_end(details, Console())


@given(
    st.builds(Update, st.integers(0), st.integers(1), st.text(), st.floats(0, allow_nan=False, allow_infinity=False))
)
def test_a_marked_line_is_one_line_and_reads_back_what_it_says(update):
    line = update.line()
    assert "\n" not in line
    assert read_update(line) == update


@pytest.mark.parametrize(
    "line", ["", "step 3/4", "@gpipe-progress ", "@gpipe-progress {}", '@gpipe-progress {"step": 1']
)
def test_other_lines_are_no_progress(line):
    assert read_update(line) is None


def test_a_followed_run_is_shown_as_one_of_ones_own():
    there, here = io.StringIO(), io.StringIO()
    marked, bar = MarkedLines(Console(file=there, width=200)), Bar(Console(file=here, width=200))
    for step in (0, 2, 4):
        marked._next = 0.0
        marked.show(Update(step, 4, "loss 1", 1.5))
    for line in there.getvalue().splitlines():
        bar.show(read_update(line))
    assert here.getvalue().splitlines() == ["step 2/4  loss 1", "step 4/4  loss 1"]
    assert json.loads(there.getvalue().splitlines()[-1].partition(" ")[2])["elapsed_s"] == 1.5


def test_a_bad_name_of_a_job_or_place_is_refused():
    from launch.jobs.submit import _check_names

    for job, storage in (("a/b", ""), ("-a", ""), ("", "relative/folder")):
        with pytest.raises(SettingError):
            _check_names(job, storage)
    _check_names("run-1.a_b", "/shared")
