"""Members and scales that a sweep rejects before training, and folders that it never deletes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments.base.cluster import Cluster
from experiments.sweeps.low_resource import RULES
from experiments.sweeps.registry import SWEEPS
from launch.sweeps import command as sweep_command
from launch.sweeps.command import sweep, with_member_threads
from launch.sweeps.tasks import IGNORED_SETTINGS, tasks_of
from suite.errors import SettingError
from suite.pipeline.planning.devices import GIB
from suite.settings import LoopSettings
from tests.launch.command_line import refusal
from tests.launch.runs.test_checkpoints import write


def test_a_folder_that_holds_another_run_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    member = SWEEPS["temperature"].members("tiny", Cluster(2, 2**30, "cpu"), tmp_path / "runs")[-1]
    assert [task.what for task in tasks_of(member, tmp_path)] == ["train", "score"]
    folder = tmp_path / "runs" / member.folder
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({"steps": member.experiment.train.steps}))
    same = member.experiment.with_settings("train.threads=2 train.checkpoint_every=3")
    (folder / "experiment.toml").write_text(same.to_toml())
    assert [task.what for task in tasks_of(member, tmp_path)] == ["score"]
    (folder / "experiment.toml").write_text(member.experiment.with_settings("train.steps=5").to_toml())
    with pytest.raises(
        SettingError, match=r"T100-0 holds a run with other settings \(there -> here: .*train.steps 5 -> 4\)"
    ):
        tasks_of(member, tmp_path)


def test_a_report_of_all_sweeps_leaves_out_those_without_the_scale(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []
    monkeypatch.setattr(sweep_command, "write_report", lambda family, *others: written.append(family.name))
    for name in ("depth_width", "low_resource"):
        member = SWEEPS[name].members("laptop_long", sweep_command.this_machine(), tmp_path / "runs")[0]
        (tmp_path / "runs" / member.folder).mkdir(parents=True)
        (tmp_path / "runs" / member.folder / "record.json").write_text('{"steps": 1}')
    sweep_command.report("", "laptop_long", Console(quiet=True))
    assert {"depth_width", "low_resource"} <= {*written}
    with pytest.raises(SettingError, match="sweep capacity has no scale 'laptop_long'"):
        sweep_command.report("capacity", "laptop_long", Console(quiet=True))


def test_text_that_a_member_lacks_is_named_before_any_member_starts(tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    Path(".cache").symlink_to(cache)
    for changed, message in (
        ({"counts": (50, 99_999)}, r"nl-99999-alone-.*asks for 99,999 pairs of nl, and django has \d+ of at most 16"),
        ({"relatives": ("xx",)}, r"corpus_languages has xx, which is not one of the \d+"),
    ):
        monkeypatch.setitem(RULES, "tiny", replace(RULES["tiny"], **changed))
        with pytest.raises(SettingError, match=message):
            sweep("low_resource", "tiny", "local", Console(quiet=True))
        assert not Path("runs").exists()


def test_a_member_has_one_thread_per_stage_on_cores_that_members_share():
    (_, alone, *_) = SWEEPS["romance"].members("laptop", Cluster(2, 12 * GIB, "cpu"), Path("runs"))
    assert alone.experiment.train.threads is None
    cores, gpus = Cluster(2, 12 * GIB, "cpu"), Cluster(2, 12 * GIB, "gpu")
    assert with_member_threads(alone.experiment, cores).train.threads == 1
    assert with_member_threads(alone.experiment, gpus) == alone.experiment
    three = alone.experiment.with_settings("train.threads=3")
    assert with_member_threads(three, cores) == three


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Returns the training of a member, and its folder: two checkpoints and three steps' metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("suite.training.checkpoint.storage.PAUSES_S", ())
    member = SWEEPS["temperature"].members("tiny", Cluster(2, 2**30, "cpu"), tmp_path / "runs")[-1]
    folder = tmp_path / "runs" / member.folder
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(member.experiment.to_toml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    for step in (2, 4):
        write(folder / "checkpoints", step)
    return tasks_of(member, tmp_path)[0], folder


def each_manifest(change):
    def damage(folder):
        for path in folder.glob("checkpoints/*/manifest.json"):
            change(path)

    return damage


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def dangling_link(folder):
    (folder / "checkpoints").rename(folder / "moved")
    (folder / "checkpoints").symlink_to("not-mounted")


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != "lock"
    }


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (each_manifest(flip_byte), "none of the 2 checkpoints can be used .*0004: bad manifest: .*0002: bad manifest"),
        (each_manifest(link_to_itself), "manifest.json: Too many levels of symbolic links; nothing was changed"),
        (each_manifest(lambda path: path.unlink()), "none of the 2 checkpoints can be used .*manifest.json is missing"),
        (dangling_link, "cannot be listed: .*checkpoints is not a folder, or a link to one that does not exist"),
    ],
)  # fmt: skip
def test_a_member_without_a_usable_checkpoint_is_rejected_and_not_changed(trained, damage, message):
    task, folder = trained
    damage(folder)
    before = contents(folder.parent)
    task.prepare()
    assert re.search(message, refusal(*task.arguments("local")))
    assert contents(folder.parent) == before


def test_settings_without_effect_on_the_result_are_settings():
    assert set(IGNORED_SETTINGS) <= set(LoopSettings.model_fields)
