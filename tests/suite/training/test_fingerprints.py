"""Fingerprints: of one tensor, of a run at every K, R and schedule, and of engines with a planted fault."""

import re

import pytest
import torch

from launch.backends.processes import run_processes
from launch.diff.compare import compare
from suite.errors import SettingError
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.training.fingerprints import PART, Fingerprint, RunFingerprints
from tests.faults import engine
from tests.faults.engine import Patches
from tests.suite.pipeline.build import join
from tests.suite.training.work import trained

IN_ORDER = ScheduleConfig("1f1b", (UNLIMITED,))
STEPS = 2


@pytest.mark.parametrize("shape", [(), (0,), (7,), (33, 5), (PART + 3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_bits_have_equal_fingerprints_and_one_other_bit_does_not(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    found = Fingerprint.of(tensor)
    assert found == Fingerprint.of(tensor.clone())
    assert found.norm == pytest.approx(float(tensor.double().norm()))
    if tensor.numel():
        other = tensor.clone().reshape(-1)
        bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[other.element_size()])
        bits[-1] ^= 1
        assert Fingerprint.of(other.reshape(shape)).digest != found.digest


def test_a_negative_zero_is_a_zero_and_the_order_in_memory_does_not_matter():
    assert Fingerprint.of(torch.tensor([0.0, 1.0])) == Fingerprint.of(torch.tensor([-0.0, 1.0]))
    image = torch.randn(2, 3, 4, 5)
    assert Fingerprint.of(image) == Fingerprint.of(image.contiguous(memory_format=torch.channels_last))


def test_sketches_estimate_how_far_two_tensors_are_apart():
    """32 sums: a relative standard error of the squared norm of sqrt(2 / 32) = 0.25, of the norm half of it."""
    ratios = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        one = torch.randn(999, generator=generator)
        change = torch.randn(999, generator=generator) * (torch.rand(999, generator=generator) < 0.2)
        ratios.append(Fingerprint.of(one).distance(Fingerprint.of(one + change)) / float(change.norm()))
    assert sum(ratios) / 200 == pytest.approx(1.0, abs=0.05)
    assert max(ratios) < 1.6
    assert min(ratios) > 0.5


@pytest.mark.parametrize("shape", [(48, 1000), (3000, 31), (1, 517)])
@pytest.mark.parametrize("is_column", [True, False])
def test_a_difference_of_equal_values_in_one_row_or_column_is_estimated_as_well(shape, is_column):
    ratios = []
    for seed in range(50):
        one = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        other = one.clone()
        changed = other[:, seed % shape[1]] if is_column else other[seed % shape[0]]
        changed += 1.0
        ratios.append(Fingerprint.of(one).distance(Fingerprint.of(other)) / len(changed) ** 0.5)
    assert min(ratios) > 0.4
    assert max(ratios) < 1.8


def test_a_record_of_another_version_is_refused(tmp_path):
    """Its hashes are others: all its tensors would seem to differ."""
    (tmp_path / "0-0.jsonl").write_text('{"step": 0, "layers": {}, "ties": [], "micro_batches": 1, "device": "cpu"}\n')
    with pytest.raises(SettingError, match="another version, whose hashes differ; train the run again"):
        RunFingerprints.read(tmp_path)


FAULTS = {
    "loss gradient": (engine.loss_gradient_off(0), r"layer 5 \(Leave\), micro-batch 0, gradient of"),
    "dropped micro-batch": (engine.dropped(0, 2), "layer 0 .*whole gradient of"),
    "another seed": (engine.other_seed(4, 0), r"layer 4 \(Block\), micro-batch 0, random state"),
    "rounded message": (
        engine.message_off("activations", 0, engine.MESSAGE_FAULTS["rounded"]),
        r"layer 3 \(Middle\), micro-batch 0, output",
    ),
    "shifted targets": (engine.targets_shifted(0), r"layer 5 \(Leave\), micro-batch 0, loss"),
    "copies not summed": (engine.copies_not_summed, r"layer 0 \(Enter\), whole gradient of table"),
    "other initial weights": (engine.other_initial(2), r"layer 2 \(Block\), initial"),
    "gradients kept": (engine.gradients_kept, "step 2, layer 0 .*whole gradient of"),
    "late learning rate": (engine.late_learning_rate, "layer . .*updated"),
    "not clipped": (engine.not_clipped, "layer . .*updated"),
    "summed twice": (engine.summed_twice, r"layer 0 \(Enter\), whole gradient of"),
}
"""Planted faults, one of each kind, and what is found first. Many more: ``tests/slow/train/test_planted_faults.py``."""

IN_REVERSE = {"loss gradient": False, "dropped micro-batch": False, "not clipped": True}
"""Faults of pipelines that add micro-batches in another order, too, and whether that explains what is found. One in an
update is judged only where all gradients are equal to the bit."""

PLANTS = {name: plant for name, (plant, _) in FAULTS.items()} | {
    "seed in recomputes": engine.another_seed_in_recomputes,
    None: lambda patches: None,
}


def record(rank, world, rendezvous, folder, cases):
    """Trains once for each case of (name, stages, replicas, schedule, planted fault)."""
    join(rank, world, rendezvous)
    for name, stages, replicas, schedule_config, fault in cases:
        with Patches() as patches:
            PLANTS[fault](patches)
            trained(rank, stages, replicas, STEPS, schedule_config=schedule_config, fingerprints=folder / name)


SAME = {
    "1f1b": (2, 1, IN_ORDER),
    "recomputed": (2, 1, ScheduleConfig("1f1b", (0,))),
    "zero bubble": (2, 1, ScheduleConfig("zero_bubble", (UNLIMITED,))),
    "interleaved": (2, 1, ScheduleConfig("interleaved", (UNLIMITED,), 2)),
    "in a V": (2, 1, ScheduleConfig("zbv", (UNLIMITED,), 2)),
    "fill-drain": (2, 1, ScheduleConfig("fill_drain", (1,))),
    "two replicas": (1, 2, IN_ORDER),
}
"""Right pipelines."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fingerprints")
    run_processes(record, 1, folder, [("alone", 1, 1, IN_ORDER, None)])
    cases = [(name, *how, None) for name, how in SAME.items()]
    cases += [(fault, *((1, 2) if fault == "summed twice" else (2, 1)), IN_ORDER, fault) for fault in FAULTS]
    reverse = ScheduleConfig("fill_drain", (1,))
    cases += [(f"{fault}, sums in reverse", 2, 1, reverse, fault) for fault in IN_REVERSE]
    cases += [("seed in recomputes", 2, 1, ScheduleConfig("1f1b", (0,)), "seed in recomputes")]
    run_processes(record, 2, folder, cases)
    return lambda name: RunFingerprints.read(folder / name)


@pytest.mark.parametrize("name", SAME)
def test_right_pipelines_are_the_same_or_explained_by_rounding(recorded, name):
    found = compare(recorded("alone"), recorded(name), "fp32")
    assert found.is_explained, list(found.lines())
    is_same = not found.differences
    assert is_same == (name not in ("fill-drain", "two replicas")), list(found.lines())
    outputs = [key for key in recorded(name).tensors if key[3].startswith("output")]
    assert len(outputs) == STEPS * 4 * (2 * 5 + 1), "x and idle of five layers, and the scores"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_where_it_is(recorded, fault):
    found = compare(recorded("alone"), recorded(fault), "fp32")
    text = "\n".join(found.lines())
    assert not found.is_explained, text
    (first,) = re.findall("the first that differs by more than rounding:\n(.*)", text)
    assert re.search(FAULTS[fault][1], first), text


@pytest.mark.parametrize(("fault", "is_explained"), IN_REVERSE.items())
def test_a_planted_fault_is_taken_for_another_order_of_sums_only_in_an_update(recorded, fault, is_explained):
    found = compare(recorded("alone"), recorded(f"{fault}, sums in reverse"), "fp32")
    assert found.is_explained == is_explained, list(found.lines())


def test_a_recompute_from_another_seed_is_named_as_one(recorded):
    found = compare(recorded("alone"), recorded("seed in recomputes"), "fp32")
    assert not found.is_explained
    assert "recomputes differ from their forwards, the first in b: step 1, layer 0" in next(found.lines())
