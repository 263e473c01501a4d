"""Training with frozen parameters: they stay to the bit, and all others go where plain torch takes them."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from launch.backends.processes import run_processes
from suite.errors import CheckpointError, NonFiniteError
from suite.pipeline.model.layers import distinct_parameters
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import OptimizerSettings
from suite.training.update_rule import learning_rate
from tests.marks import slow_but_for
from tests.suite.pipeline.build import join, mini_batch, whole
from tests.suite.pipeline.build import run as run_layers
from tests.suite.pipeline.freezing import FREEZES, freeze
from tests.suite.pipeline.toy import SumLoss, toy_batch, toy_layers
from tests.suite.training.checkpoint.saves import layer_path
from tests.suite.training.work import SETTINGS, merge, trained

STEPS, MIDDLE = 6, 3
SAVED = ("the first half", "weights")
"""Of these, checkpoints are written: a whole stage is frozen, single parameters of both stages are."""
TRAINED = ("the layers of a middle stage", "the tied parameter", "all but one bias at the end", *SAVED)
CASES = (
    *((name, "adamw", ScheduleConfig()) for name in TRAINED),
    ("the first half", "adafactor", ScheduleConfig("1f1b", (UNLIMITED,))),
    *((name, "adamw", ScheduleConfig("zero_bubble", (UNLIMITED,))) for name in SAVED),
    *((name, "adamw", ScheduleConfig("interleaved", (1,), 2)) for name in SAVED),
)


def cases(rank, world, rendezvous, stages, replicas, folder, at):
    """Returns, for each case, what ``trained`` does of six steps, and of those after the checkpoint of the third step
    that another number of stages and replicas wrote; ``at`` says to write them, or to read them."""
    join(rank, world, rendezvous)
    place, found = (rank, stages, replicas), {}
    for name, optimizer, schedule_config in CASES:
        options = {"optimizer": optimizer, "schedule_config": schedule_config, "frozen": FREEZES[name]}
        found[name, optimizer, schedule_config] = trained(*place, STEPS, **options)
    for name in SAVED:
        own = f"{folder}/{name}"
        if at == "write":
            trained(*place, MIDDLE, own, frozen=FREEZES[name])
        else:
            found[name, "resumed"] = trained(*place, STEPS, own, resume=True, frozen=FREEZES[name])
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("frozen")


def merged(results):
    return {case: merge([result[case] for result in results]) for case in results[0]}


@pytest.fixture(scope="module")
def sharded(folder):
    """Two stages of two replicas; for all but Adafactor with ZeRO-1."""
    return merged(run_processes(cases, 4, 2, 2, str(folder), "write"))


@pytest.fixture(scope="module")
def three_stages(sharded, folder):
    return merged(run_processes(cases, 3, 3, 1, str(folder), "read"))


@cache
def by_torch(name, optimizer, factors=lambda *_: (1.0, 1.0)):
    """Returns ([(loss, norm)], final values) of the model in one piece, trained by torch alone."""
    made = whole(freeze(toy_layers(), FREEZES[name]))
    settings = OptimizerSettings(name=optimizer, **SETTINGS)
    trainable = [(f"{index}.{own}", p) for index, own, p in distinct_parameters(made) if p.requires_grad]
    parameters = [p for _, p in trainable]
    groups = [{"params": [p], "weight_decay": SETTINGS["weight_decay"] * factors(own, p)[1]} for own, p in trainable]
    update = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9),
        "rmsprop": lambda: torch.optim.RMSprop(groups, alpha=0.98, eps=1e-9, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(groups, d=1.0),
    }[optimizer]()
    seen = []
    for step in range(STEPS):
        batch = mini_batch(*toy_batch(8, seed=100 + step), 4)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        loss = sum(
            SumLoss()(*run_layers(made, inputs, step, i), *targets)[0]
            for i, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True))
        )
        (loss / batch.divisor).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, SETTINGS["max_grad_norm"])
        for group, (own, p) in zip(update.param_groups, trainable, strict=True):
            group["lr"] = learning_rate(step, settings) * factors(own, p)[0]
        update.step()
        seen.append((loss.item() / batch.divisor, norm.item()))
    values = {(index, own): p.detach() for index, layer in enumerate(made) for own, p in layer.named_parameters()}
    return seen, values


def assert_close(one, other, tolerance=1e-5):
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance, atol=0)
    assert one[1].keys() == other[1].keys()
    for key in one[1]:
        np.testing.assert_allclose(one[1][key], other[1][key], rtol=0, atol=tolerance, err_msg=str(key))


@pytest.mark.parametrize("workers", slow_but_for(["sharded"], ["sharded", "three_stages"]))
def test_losses_norms_and_values_are_those_of_torch(workers, request):
    found = request.getfixturevalue(workers)
    for name, optimizer, schedule_config in CASES:
        assert_close(found[name, optimizer, schedule_config], by_torch(name, optimizer))


@pytest.mark.parametrize("workers", slow_but_for(["sharded"], ["sharded", "three_stages"]))
def test_frozen_values_stay_to_the_bit_and_others_move(workers, request):
    for case, (_, weights) in request.getfixturevalue(workers).items():
        for index, layer in enumerate(whole(freeze(toy_layers(), FREEZES[case[0]]))):
            for own, parameter in layer.named_parameters():
                same = np.array_equal(weights[index, own], parameter.detach().numpy())
                assert same != parameter.requires_grad, (case, index, own)


@pytest.mark.slow
def test_a_checkpoint_with_frozen_parameters_resumes_at_another_k_and_r(sharded, three_stages):
    for name in SAVED:
        losses, weights = sharded[name, "adamw", ScheduleConfig()]
        assert_close(three_stages[name, "resumed"], (losses[MIDDLE:], weights), tolerance=1e-6)


@pytest.mark.parametrize("name", SAVED)
def test_it_has_all_values_and_only_the_state_of_what_is_trained(sharded, folder, name):
    for index, layer in enumerate(freeze(toy_layers(), FREEZES[name])):
        with safe_open(layer_path(folder / name / f"{MIDDLE:08d}", index), "pt") as file:
            keys = list(file.keys())
        own = dict(layer.named_parameters())
        assert {key.removeprefix("value/") for key in keys if key.startswith("value/")} == own.keys()
        state = {key.split("/")[1] for key in keys if key.startswith("state/")}
        assert state == {part for part, parameter in own.items() if parameter.requires_grad}


def resumed(rank, world, rendezvous, folder):
    join(rank, world, rendezvous)
    trained(rank, 1, 1, STEPS, folder, resume=True, frozen=FREEZES["the last layers"])


def test_state_of_a_parameter_that_is_frozen_by_now_is_refused(sharded, folder):
    with pytest.raises(CheckpointError, match=r"layer 4 .* this model does not train: mix.bias/exp_avg"):
        run_processes(resumed, 1, str(folder / "the first half"))


def spoiled(rank, world, rendezvous):
    join(rank, world, rendezvous)
    frozen = FREEZES["the layers of a middle stage"]
    trained(rank, 2, 1, STEPS, poison=("gradient", 4, 2), spoil=(2, 3, 4), frozen=frozen)


def test_bad_numbers_are_traced_past_frozen_layers():
    origin = r"the first non-finite number was at .*micro-batch 2, layer 4: .*, gradient of input 0"
    with pytest.raises(NonFiniteError, match=origin):
        run_processes(spoiled, 2)
