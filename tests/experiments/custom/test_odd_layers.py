"""Odd layers train as plain PyTorch trains the objects themselves, or are refused before a worker starts."""

import pytest

from experiments.custom.experiment import find_custom
from launch.diff import check as checking
from suite.errors import SettingError
from suite.settings import PipelineSettings
from tests.experiments.custom import odd_layers
from tests.launch.command_line import call

SHAPES = [
    PipelineSettings(stages=1, micro_batches=2, schedule="1f1b", remat="never"),
    PipelineSettings(stages=2, micro_batches=2, schedule="1f1b", remat="always"),
    PipelineSettings(stages=2, micro_batches=2, schedule="zero_bubble", remat="never"),
    PipelineSettings(stages=2, replicas=2, micro_batches=1, schedule="1f1b"),
]
OWN_BUFFERS = (odd_layers.spectral_norm, odd_layers.old_spectral_norm)
"""Each forward changes buffers, of which each replica has its own."""


@pytest.mark.parametrize("make", odd_layers.REFUSED, ids=lambda make: make.__name__)
def test_what_a_copy_would_part_or_lose_is_refused(make):
    try:
        (said,) = find_custom(f"{odd_layers.__file__}:{make.__name__}").trial_errors()
    except SettingError as error:
        said = str(error)
    assert odd_layers.REFUSED[make] in said


@pytest.mark.parametrize(
    "make",
    [odd_layers.everything, *(pytest.param(make, marks=pytest.mark.slow) for make in odd_layers.TRAINED)],
    ids=lambda make: make.__name__,
)
def test_all_else_trains_as_the_objects_themselves(make, tmp_path, monkeypatch):
    shapes = SHAPES[:3] if make in OWN_BUFFERS else SHAPES
    monkeypatch.setattr(checking, "_shapes", lambda *_: (shapes, []))
    code, out, errors = call("check", f"{odd_layers.__file__}:{make.__name__}", "--steps", "2", folder=tmp_path)
    assert code == 0, out + errors
    assert f"all {len(shapes)} are the same training as plain PyTorch" in out
