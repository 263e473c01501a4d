"""The folder of an export: a new export replaces its own files, and nothing is lost when it is killed."""

import os

import pytest
import torch
from safetensors.torch import save_file

from launch.inference.export import _complete


def tree(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def export(folder, **files):
    with _complete(folder) as draft:
        write(draft, **files)


@pytest.fixture
def folder(tmp_path):
    """An export that its user keeps in git."""
    folder = tmp_path / "export"
    export(folder, config_json="old", **{"model-1_safetensors": "old", "model_safetensors_index_json": "old"})
    write(folder, _git__HEAD="main", _gitattributes="lfs", notes_md="mine")
    return folder


def test_an_export_that_fails_while_it_is_written_keeps_the_previous_one(folder):
    before = tree(folder)

    def fails():
        with _complete(folder) as draft:
            write(draft, config_json="new")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert tree(folder) == before


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_mode_of_new_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        with _complete(tmp_path / "export") as draft:
            draft.mkdir()
            save_file({"a": torch.ones(2)}, draft / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "export/model.safetensors").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("renames", range(6))
def test_an_export_keeps_what_is_the_users_and_loses_nothing_when_it_is_killed(folder, monkeypatch, renames):
    before, done = tree(folder), []
    rename = type(folder).rename

    def killed(path, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    monkeypatch.setattr("pathlib.Path.rename", killed)
    try:
        export(folder, config_json="new", model_safetensors="new")
    except KeyboardInterrupt:
        everything = {name.partition("/")[2]: text for name, text in tree(folder.parent).items()}
        assert before.items() - {("config.json", "old")} <= everything.items()
    monkeypatch.undo()
    export(folder, config_json="newest", model_safetensors="newest")
    kept = {"config.json": "newest", "model.safetensors": "newest"}
    assert tree(folder) == kept | {".git/HEAD": "main", ".gitattributes": "lfs", "notes.md": "mine"}
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
