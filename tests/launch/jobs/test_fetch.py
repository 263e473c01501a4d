"""The archive of a job's runs: packing on the cluster, and unpacking."""

import io
import tarfile

import pytest

from launch.jobs import remote_archive
from launch.jobs.client import JobError
from launch.jobs.fetch import read_archive, unpack
from launch.runs.store import run_lock
from suite.errors import RunFileError


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
    remote_archive.main({"storage": str(tmp_path / "storage"), "job": "j", "extra_folders": ["sweep"], "limit": 10**6})
    return capsys.readouterr().out


def test_an_archive_has_all_files_but_checkpoints_and_weights(tmp_path, capsys):
    head, packed = read_archive("a line of Ray's\n" + archive(tmp_path, capsys))
    source = {"job": "j", "address": "a"}
    for _ in range(2):
        unpack(packed, head["folders"], tmp_path / "runs", source)
        found = {str(path.relative_to(tmp_path / "runs")) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
        assert found == {"t/1/record.json", "t/1/logs/stage-0-0.log", "t/1/fetched.json"}
    unpack(packed, head["folders"], tmp_path / "runs", source | {"job": "k"})  # that went on with the run
    with pytest.raises(JobError, match="already exists and was not fetched from the storage of this cluster, at b"):
        unpack(packed, head["folders"], tmp_path / "runs", source | {"address": "b"})


def test_a_first_fetch_that_is_interrupted_can_be_repeated(tmp_path, capsys, monkeypatch):
    head, packed = read_archive(archive(tmp_path, capsys))
    source = {"job": "j", "address": "a"}

    def killed(self, path, *arguments, **settings):
        (path / "t/1/record.json").write_text("torn")
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "extractall", killed)
    with pytest.raises(KeyboardInterrupt):
        unpack(packed, head["folders"], tmp_path / "runs", source)
    monkeypatch.undo()
    unpack(packed, head["folders"], tmp_path / "runs", source)
    assert (tmp_path / "runs/t/1/record.json").read_text() == "record.json"


def test_two_clusters_behind_one_address_are_told_apart_by_their_storage(tmp_path, capsys):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (head, packed), (other_head, other) = (
        read_archive(archive(tmp_path / name, capsys)) for name in ("one", "two")
    )  # fmt: skip
    here = {"job": "j", "address": "http://127.0.0.1:8265"}
    unpack(packed, head["folders"], tmp_path / "runs", here | {"storage": head["storage"]})
    with pytest.raises(JobError, match="was not fetched from the storage of this cluster"):
        unpack(other, other_head["folders"], tmp_path / "runs", here | {"storage": other_head["storage"]})
    again = {"job": "j", "address": "http://127.0.0.1:9000", "storage": head["storage"]}
    unpack(packed, head["folders"], tmp_path / "runs", again)  # another tunnel to the same cluster


def test_a_damaged_note_of_a_fetch_is_named(tmp_path, capsys):
    head, packed = read_archive(archive(tmp_path, capsys))
    (tmp_path / "runs/t/1").mkdir(parents=True)
    (tmp_path / "runs/t/1/fetched.json").write_text("")
    with pytest.raises(RunFileError, match=r"fetched\.json is damaged: it is empty"):
        unpack(packed, head["folders"], tmp_path / "runs", {"job": "j", "address": "a"})


def test_storage_behind_a_symbolic_link_is_packed_with_relative_names(tmp_path, capsys):
    """A run notes its real path; the job has the path that was given."""
    real, link = tmp_path / "disk" / "storage", tmp_path / "storage"
    run = real / "runs" / "t" / "1"
    for path in (run / "record.json", real / "runs" / "sweep-tiny" / "report.md", real / "jobs" / "j"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{run}\n")
    link.symlink_to(real)
    remote_archive.main({"storage": str(link), "job": "j", "extra_folders": ["sweep-tiny"], "limit": 10**6})
    head, packed = read_archive(capsys.readouterr().out)
    assert head["folders"] == ["t/1", "sweep-tiny"]
    (tmp_path / "local").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "local")
    unpack(packed, head["folders"], tmp_path / "runs", {"job": "j", "address": "a"})
    assert (tmp_path / "local" / "t" / "1" / "record.json").exists()


def test_a_noted_folder_outside_of_the_storage_is_not_packed(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "storage" / "jobs").mkdir(parents=True)
    (tmp_path / "storage" / "jobs" / "j").write_text(f"{tmp_path / 'private'}\n")
    with pytest.raises(SystemExit, match="private lies outside of"):
        remote_archive.main({"storage": str(tmp_path / "storage"), "job": "j", "extra_folders": [], "limit": 10**6})


def test_wandb_files_of_a_run_in_training_are_not_packed(tmp_path, capsys):
    """The last part is incomplete; uploading it now would lose or repeat steps later."""
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


def test_an_incomplete_or_damaged_archive_is_rejected(tmp_path, capsys):
    lines = archive(tmp_path, capsys).splitlines()
    with pytest.raises(JobError, match="is incomplete"):
        read_archive("\n".join(lines[:-1]))
    with pytest.raises(JobError, match="is damaged"):
        read_archive("\n".join([lines[0], "A" + lines[1][1:], *lines[2:]]))
    with pytest.raises(JobError, match="is damaged: 0 of"):
        read_archive("\n".join([lines[0], "?", *lines[2:]]))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_a_link_or_a_pipe_is_not_unpacked(tmp_path, kind):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.addfile(tarfile.TarInfo("t/1/good"), io.BytesIO())
        odd = tarfile.TarInfo("t/1/odd")
        odd.type, odd.linkname = kind, "/etc/hostname"
        file.addfile(odd)
    with pytest.raises(JobError, match="nothing was unpacked"):
        unpack(buffer.getvalue(), ["t/1"], tmp_path / "runs", {"job": "j", "address": "a"})
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "t/1/../../../out", "t/2/record.json"])
def test_an_archive_with_a_path_outside_of_its_runs_is_not_unpacked(tmp_path, name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        file.addfile(tarfile.TarInfo("t/1/good"), io.BytesIO())
        file.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(JobError, match="nothing was unpacked"):
        unpack(buffer.getvalue(), ["t/1"], tmp_path / "runs", {"job": "j", "address": "a"})
    with pytest.raises(JobError, match="nothing was unpacked"):
        unpack(buffer.getvalue(), ["../t"], tmp_path / "runs", {"job": "j", "address": "a"})
    assert not list(tmp_path.rglob("*"))
