"""Fixtures of the tests of inference."""

import sys

import pytest


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """An empty folder for the model code that ``transformers`` loads. No module of another test's folder is left:
    otherwise the second test of a process would look for its files in the first one's folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    _forget()
    yield
    _forget()


def _forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
