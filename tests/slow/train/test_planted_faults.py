"""``gpipe diff`` at a size: nearly a hundred faults, at every layer, message and micro-batch, and right pipelines."""

import random
import re

from launch.backends.processes import run_processes
from launch.diff.compare import compare
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.training.fingerprints import RunFingerprints
from tests.faults import engine
from tests.suite.pipeline.build import join
from tests.suite.pipeline.freezing import FREEZES
from tests.suite.training.test_fingerprints import IN_ORDER, STEPS
from tests.suite.training.work import trained

LAYERS, MICRO_BATCHES = 6, 4
PARAMETERS = [(0, "table"), (0, "idle"), (3, "table"), (5, "out.weight"), (5, "out.bias")]
PARAMETERS += [(layer, f"mix.{name}") for layer in (1, 2, 3, 4) for name in ("weight", "bias")]
PIPELINES = 1000
AT_ONCE = 25
"""Pipelines of one process: each leaves process groups with their threads behind."""


def all_faults():
    """Yields (name, what plants it, what must be named)."""
    for layer in range(LAYERS):
        named = rf"layer {layer} .*"
        for i in (0, 2):
            yield f"output of layer {layer}, {i}", engine.output_off(layer, i), f"{named}, micro-batch {i}, output"
            yield f"seed of layer {layer}, {i}", engine.other_seed(layer, i), f"{named}micro-batch {i}, random state"
        yield f"initial weights of layer {layer}", engine.other_initial(layer), rf"layer {layer} .*, initial"
    for layer in range(1, LAYERS):
        for i in (1, 3):
            found = rf"layer {layer} .*, micro-batch {i}, gradient of input 0"
            yield f"input gradient of layer {layer}, {i}", engine.input_gradient_off(layer, i), found
        found = rf"layer {layer} .*, whole gradient of"
        yield f"weight gradient of layer {layer} in bf16", engine.summed_in_bf16(layer), found
    yield "seed in the second step", engine.other_seed(1, 0, 1), r"step 2, layer 1 .*, micro-batch 0, random state"
    for i in range(MICRO_BATCHES):
        yield f"targets {i}", engine.targets_shifted(i), rf"layer 5 .*, micro-batch {i}, loss"
        yield f"loss gradient {i}", engine.loss_gradient_off(i), rf"layer 5 .*, micro-batch {i}, gradient of"
        for first in (0, 3):
            yield f"stage of layer {first} drops {i}", engine.dropped(first, i), rf"layer {first} .*, whole gradient of"
        for name, change in engine.MESSAGE_FAULTS.items():
            if name == "stale" and i == 0:
                continue
            found = rf"layer 3 .*, micro-batch {i}, output 0"
            yield f"{name} activations {i}", engine.message_off("activations", i, change), found
            found = rf"layer 2 .*, micro-batch {i}, gradient of"
            yield f"{name} gradients {i}", engine.message_off("gradients", i, change), found
    for layer, name in PARAMETERS:
        yield f"{layer}.{name} not updated", engine.parameter_skipped(layer, name), rf"layer {layer} .*, updated {name}"
    yield "copies not summed", engine.copies_not_summed, "layer 0 .*, whole gradient of table"
    yield "gradients kept", engine.gradients_kept, "step 2, layer 0 .*, whole gradient of"
    yield "late learning rate", engine.late_learning_rate, "layer . .*, updated"
    yield "not clipped", engine.not_clipped, "layer . .*, updated"


FAULTS = {name: (plant, found) for name, plant, found in all_faults()}
OF_REPLICAS = {
    "summed twice": (engine.summed_twice, "layer 0 .*, whole gradient of"),
    **{
        f"gradients of layer {layer} without {i}": (engine.replica_lost(layer, i), f"layer {layer} .*, whole gradient")
        for layer in (1, 4)
        for i in (1, 3)
    },
}


IN_ONE_COPY = "weight gradient of layer 3 in bf16"
"""A fault in one copy of a tied parameter: the sum of all differs, so each of them may be the wrong one."""


def record(rank, world, rendezvous, folder, first, names):
    """Trains once for each fault; ``first`` is the number of the first."""
    join(rank, world, rendezvous)
    for number, name in enumerate(names, first):
        shape, plant = ((2, 1), FAULTS[name][0]) if name in FAULTS else ((1, 2), OF_REPLICAS[name][0])
        with engine.Patches() as patches:
            plant(patches)
            trained(rank, *shape, STEPS, schedule_config=IN_ORDER, optimizer="adamw", fingerprints=folder / str(number))


def record_right(rank, world, rendezvous, folder, cases):
    join(rank, world, rendezvous)
    for name, shape, schedule_config, keywords in cases:
        trained(rank, *shape, schedule_config=schedule_config, fingerprints=folder / name, **keywords)


def test_nearly_all_planted_faults_are_named_where_they_are(tmp_path):
    keywords = {"until": STEPS, "optimizer": "adamw"}
    run_processes(record_right, 1, tmp_path, [("alone", (1, 1), IN_ORDER, keywords)])
    alone = RunFingerprints.read(tmp_path / "alone")
    names = [*FAULTS, *OF_REPLICAS]
    for at in range(0, len(names), AT_ONCE):
        run_processes(record, 2, tmp_path, at, names[at : at + AT_ONCE])
    missed = {}
    for number, name in enumerate(names):
        comparison = compare(alone, RunFingerprints.read(tmp_path / str(number)), "fp32")
        text = "\n".join(comparison.lines())
        (first,) = re.findall("the first that .*:\n(.*)", text) or [text]
        if comparison.is_explained or not re.search({**FAULTS, **OF_REPLICAS}[name][1], first):
            missed[name] = text
    assert len(names) > 90
    assert missed.keys() == {IN_ONE_COPY}, missed
    assert r"layer 0 (Enter), whole gradient of table, with its copies of layer 3" in missed[IN_ONE_COPY]


SCHEDULES = (
    *[("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1), ("zero_bubble", 2), ("interleaved", 2), ("interleaved", 3)],
    *[("zbv", 2), ("v_half", 2), ("v_min", 2)],
)
FROZEN = ("nothing", "the first layer", "the last layers", "weights", "the tied parameter")


def draw(seed):
    """Returns a right pipeline: (name, (K, R), schedule, keywords of what is trained)."""
    rng = random.Random(seed)
    shape = rng.choice([(2, 1), (2, 1), (2, 1), (1, 2), (1, 1)])
    name, virtual_stages = rng.choice(SCHEDULES) if shape[0] == 2 else rng.choice(SCHEDULES[:3])
    graphs = rng.choice([0, 1, 2, UNLIMITED])
    what = {
        "until": 2, "optimizer": rng.choice(["adamw", "sgd", "rmsprop"]), "total": rng.choice([4, 8]),
        "frozen": FREEZES[rng.choice(FROZEN)],
    }  # fmt: skip
    return str(seed), shape, ScheduleConfig(name, (graphs,), virtual_stages), what


def test_no_right_pipeline_is_an_alarm(tmp_path):
    drawn = [draw(seed) for seed in range(PIPELINES)]
    truths = {repr(what): what for _, _, _, what in drawn}
    alone = {key: f"alone {number}" for number, key in enumerate(truths)}
    run_processes(record_right, 1, tmp_path, [(alone[key], (1, 1), IN_ORDER, what) for key, what in truths.items()])
    for workers in (1, 2):
        cases = [case for case in drawn if case[1][0] * case[1][1] == workers]
        for at in range(0, len(cases), AT_ONCE):
            run_processes(record_right, workers, tmp_path, cases[at : at + AT_ONCE])
    alarms, equal = {}, 0
    expected = {key: RunFingerprints.read(tmp_path / name) for key, name in alone.items()}
    for name, shape, schedule_config, what in drawn:
        found = compare(expected[repr(what)], RunFingerprints.read(tmp_path / name), "fp32")
        equal += not found.differences
        if not found.is_explained:
            alarms[name, shape, schedule_config.schedule] = list(found.lines())
    assert not alarms
    assert equal > PIPELINES / 4, "the others add up in another order"
