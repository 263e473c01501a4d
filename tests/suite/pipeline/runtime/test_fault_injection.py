"""The plan of faults: who is meant, what strikes once, what is spoiled. The deadly ones are in tests/slow."""

import json
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from suite.errors import SettingError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.fault_injection import InjectedError, plan_text, planned_faults

PLACE = RankCoord(1, 3, 1)


def of(tmp_path, *faults, coord=PLACE, attempt=1):
    return planned_faults(json.dumps(faults), coord, attempt, tmp_path)


def test_without_a_plan_for_this_worker_there_is_no_hook(tmp_path, monkeypatch):
    assert planned_faults("", PLACE, 1, tmp_path) is None
    assert of(tmp_path, {"fault": "kill", "stage": 2}) is None
    assert of(tmp_path, {"fault": "kill"}, attempt=2) is None  # of the first attempt, unless it says otherwise
    assert of(tmp_path, {"fault": "kill", "attempt": None}, attempt=2) is not None
    with pytest.raises(SettingError):
        of(tmp_path, {"fault": "flood"})
    (tmp_path / "plan.json").write_text('[{"fault": "kill"}]\n')
    monkeypatch.setenv("GPIPE_FAULTS", str(tmp_path / "plan.json"))
    assert planned_faults(plan_text(), PLACE, 1, tmp_path) is not None


def test_a_fault_strikes_once_and_only_where_it_is_meant(tmp_path):
    faults = of(tmp_path, {"fault": "raise", "step": 3, "action": "F2"})
    for action, step in (("F2", 2), ("F1", 3), ("F2", None)):
        faults.strike(action, step)
    with pytest.raises(InjectedError):
        faults.strike("F2", 3)
    faults.strike("F2", 3)


def test_a_fault_of_a_layer_waits_for_its_forward(tmp_path):
    layer = nn.Linear(2, 2)
    faults = of(tmp_path, {"fault": "raise", "action": "F0", "layer": 4})
    faults.arm({4: layer})
    faults.strike("F0", 0)
    with pytest.raises(InjectedError):
        layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))


def test_what_is_spoiled(tmp_path):
    faults = of(
        tmp_path,
        {"fault": "nan", "of": "gradient", "step": 1, "action": "B0", "layer": 4},
        {"fault": "inf", "step": 2, "action": "F1", "layer": 4},
        {"fault": "nan", "layer": 9},
        {"fault": "inf", "of": "loss", "step": 3},
    )
    layer, there = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    faults.arm({4: layer})
    for step, spoiled in ((0, False), (1, True)):
        faults.strike("F0", step)
        output = layer(there)
        assert output.isfinite().all()
        faults.strike("B0", step)
        assert bool(torch.autograd.grad(output.sum(), there)[0].isnan().all()) == spoiled
    faults.strike("F1", 2)
    assert layer(there).isinf().all()
    assert faults.spoil_loss(torch.ones(())) == 1
    faults.strike("F0", 3)
    assert layer(there).isfinite().all()
    assert faults.spoil_loss(torch.ones(())).isinf()


def test_a_layer_must_be_named_where_one_is_spoiled(tmp_path):
    with pytest.raises(SettingError, match="nan of gradient needs a layer"):
        of(tmp_path, {"fault": "nan", "of": "gradient"})


def test_messages_are_late_by_chance(tmp_path):
    faults = of(tmp_path, {"fault": "delay", "seconds": 0.01})
    begin = time.monotonic()
    for _ in range(20):
        faults.delay_message()
    assert time.monotonic() - begin > 0.03


def test_a_full_disk_is_an_error_of_writing_and_kills_nobody(tmp_path):
    script = (
        "import sys; from pathlib import Path; from suite.pipeline.runtime.fault_injection import planned_faults; "
        "from suite.pipeline.model.topology import RankCoord; folder = Path(sys.argv[1]); "
        """planned_faults('[{"fault": "full", "bytes": 100}]', RankCoord(0, 1, 1), 1, folder).strike('save', 0); """
        "(folder / 'small').write_text('x' * 100); (folder / 'large').write_text('x' * 101)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert (tmp_path / "small").stat().st_size == 100
