"""Names that a user's folder shares with the environment."""

import re
import sys

import pytest

from experiments.custom import own_imports
from experiments.custom.own_imports import ROOT, check_names, search_last
from suite.errors import SettingError


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{re.sub('__(?=.)', '/', name, count=1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("importer", "files", "taken"),
    [
        ("own", {"own": "import datasets", "datasets": ""}, "datasets.py"),
        ("own", {"own": "def f():\n    from models import net", "models__net": ""}, "models/net.py"),
        ("own", {"own": "import models.net", "models__net": ""}, "models/net.py"),
        ("helper", {"own": "import helper", "helper": "import random as r", "random": ""}, "random.py"),
        (
            "net/b",
            {
                "own": "from net import a",
                "net____init__": "",
                "net__a": "from .b import B",
                "net__b": "import datasets",
                "datasets": "",
            },
            "datasets.py",
        ),
        ("parts/blocks", {"own": "from parts import blocks", "parts__blocks": "import torch", "torch": ""}, "torch.py"),
    ],
)
def test_a_name_that_is_taken_is_refused(tmp_path, importer, files, taken):
    write(tmp_path, **files)
    name = taken.partition("/")[0]
    with pytest.raises(SettingError) as error:
        check_names(tmp_path, tmp_path / "own.py")
    assert str(error.value) == (
        f"{tmp_path}/{importer}.py imports {name.removesuffix('.py')}, and this name has both {tmp_path}/{taken} and a "
        f"module of the suite's environment; rename {name}"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"own": "import helper, torch", "helper": "import own, datasets"},
        {"own": "import torch", "datasets": "", "models__net": "", "test": ""},  # not imported
        {"own": "from datasets import load_dataset", "datasets__notes": ""},  # no package
        {"own": "from . import datasets", "datasets": ""},
        {"own": "import (", "datasets": ""},
    ],
)
def test_other_names_are_not(tmp_path, files):
    write(tmp_path, **files)
    check_names(tmp_path, tmp_path / "own.py")


def test_a_module_of_the_current_folder_is_checked_too(tmp_path):
    write(tmp_path, models__net="")
    with pytest.raises(SettingError, match="rename models"):
        check_names(tmp_path, None, ("models.net",))


def test_each_file_is_read_once_and_none_of_the_suite(tmp_path, monkeypatch):
    read, imported = [], own_imports._imported
    monkeypatch.setattr(own_imports, "_imported", lambda file: read.append(file) or imported(file))
    write(tmp_path, own="import net.a, net.b", net____init__="import net.a", net__a="from net import b", net__b="")
    check_names(tmp_path, tmp_path / "own.py")
    assert sorted(path.stem for path in read) == ["__init__", "a", "b", "own"]
    read.clear()
    check_names(ROOT, None, ("tests.quick_measuring",))
    assert {path.stem for path in read} == {"__init__", "quick_measuring"}


def test_a_folder_is_searched_last(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    search_last(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    assert sys.path[-1] == str(tmp_path)
