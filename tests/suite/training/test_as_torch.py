"""Training goes where plain torch takes it: with each optimizer, frozen parameters, and rates of each parameter."""

import shutil
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from launch.backends.processes import run_processes
from suite.errors import CheckpointError
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

STEPS, MIDDLE = 4, 2


def alike(name, parameter):
    return 1.0, 1.0


def layer_wise(name, parameter):
    """Layer-wise rates; no decay of biases, nor of ``5.out.bias`` and ``0.idle`` any update: groups of few values."""
    layer = int(name.split(".")[0])
    return 0.0 if name in ("5.out.bias", "0.idle") else 0.5 ** (5 - layer), float(parameter.ndim > 1)


class Case(NamedTuple):
    frozen: str = "nothing"
    optimizer: str = "adamw"
    schedule_config: ScheduleConfig = ScheduleConfig()
    factors: Callable = alike
    """Of each parameter's rate and decay."""

    def trained(self, *where, **others):
        return trained(*where, **{**self._asdict(), "frozen": FREEZES[self.frozen]}, **others)


IN_ORDER = ScheduleConfig("1f1b", (UNLIMITED,))
SAVED = (
    *(Case(frozen) for frozen in ("the first half", "weights")),
    *(Case("nothing", name, IN_ORDER, layer_wise) for name in ("adamw", "sgd", "rmsprop", "adafactor")),
)
"""Of these, checkpoints are written, too. A whole stage is frozen, or single parameters of both stages are."""
CASES = (
    *SAVED,
    *(Case(frozen) for frozen in ("the layers of a middle stage", "the tied parameter", "all but one bias at the end")),
    Case("the first half", "adafactor", IN_ORDER),
    Case("weights", schedule_config=ScheduleConfig("zero_bubble", (UNLIMITED,))),
    Case("the first half", schedule_config=ScheduleConfig("interleaved", (1,), 2)),
)


def cases_of(stages):
    """Returns those that so many stages have: one stage has one cell."""
    return [case for case in CASES if stages > 1 or case.schedule_config.virtual_stages == 1]


def cases(rank, world, rendezvous, stages, replicas, folder):
    """Returns, for each case, what ``trained`` does of all steps, and of those after a checkpoint of the middle."""
    join(rank, world, rendezvous)
    place, found = (rank, stages, replicas), {}
    for case in cases_of(stages):
        found[case] = case.trained(*place, STEPS)
    for at, case in enumerate(SAVED):
        case.trained(*place, MIDDLE, f"{folder}/{at}")
        found["resumed", case] = case.trained(*place, STEPS, f"{folder}/{at}", resume=True)
    return found


def resumed_elsewhere(rank, world, rendezvous, folder):
    """Returns, for each case of which there is a checkpoint, the steps after it on one stage for each worker."""
    join(rank, world, rendezvous)
    return {case: case.trained(rank, world, 1, STEPS, f"{folder}/{at}", resume=True) for at, case in enumerate(SAVED)}


def merged(results):
    return {case: merge([result[case] for result in results]) for case in results[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("as-torch")


@pytest.fixture(scope="module")
def found(folder):
    """Returns what pipelines of so many stages and replicas do. Replicas have ZeRO-1 but for Adafactor, three of them
    stretches without a value."""

    @cache
    def found(stages, replicas):
        workers = stages * replicas
        return merged(run_processes(cases, workers, stages, replicas, str(folder / f"{stages}-{replicas}")))

    return found


@cache
def by_torch(name, optimizer, factors):
    """Returns ([(loss, norm)], final values, keys of frozen ones) of the model in one piece, trained by torch alone."""
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
    named = {(index, own): p for index, layer in enumerate(made) for own, p in layer.named_parameters()}
    values = {key: p.detach() for key, p in named.items()}
    return seen, values, [key for key, p in named.items() if not p.requires_grad]


def assert_close(one, other, tolerance=1e-5):
    np.testing.assert_allclose(one[0], other[0], rtol=tolerance, atol=0)
    assert one[1].keys() == other[1].keys()
    for key in one[1]:
        np.testing.assert_allclose(one[1][key], other[1][key], rtol=0, atol=tolerance, err_msg=str(key))


PIPELINES = slow_but_for([(2, 2)], [(2, 2), (3, 1), (1, 1), (1, 3)])


@pytest.mark.parametrize(("stages", "replicas"), PIPELINES)
def test_losses_norms_and_values_are_those_of_torch_and_frozen_values_stay_to_the_bit(found, stages, replicas):
    for case in cases_of(stages):
        own, expected = found(stages, replicas)[case], by_torch(case.frozen, case.optimizer, case.factors)
        assert_close(own, expected)
        assert all(np.array_equal(own[1][key], expected[1][key]) for key in expected[2]), case
        assert np.array_equal(own[1][0, "table"], own[1][3, "table"])  # copies of the tied parameter


@pytest.mark.parametrize(("stages", "replicas"), PIPELINES)
def test_a_resumed_run_has_the_same_bits(found, stages, replicas):
    for case in SAVED:
        (losses, weights), (resumed_losses, resumed) = map(found(stages, replicas).get, (case, ("resumed", case)))
        assert resumed_losses == losses[MIDDLE:]
        assert all(np.array_equal(weights[key], resumed[key]) for key in weights)


@pytest.mark.slow
def test_a_checkpoint_resumes_at_another_k_and_r(found, folder, tmp_path):
    whole_runs = found(2, 2)
    copied = shutil.copytree(folder / "2-2", tmp_path / "2-2", ignore=shutil.ignore_patterns(f"{STEPS:08d}"))
    for case, resumed in merged(run_processes(resumed_elsewhere, 3, str(copied))).items():
        losses, weights = whole_runs[case]
        assert_close(resumed, (losses[MIDDLE:], weights), tolerance=1e-6)


@pytest.mark.parametrize("at", [0, 1])
def test_a_checkpoint_has_all_values_and_only_the_state_of_what_is_trained(found, folder, at):
    found(2, 2)
    for index, layer in enumerate(freeze(toy_layers(), FREEZES[SAVED[at].frozen])):
        with safe_open(layer_path(folder / f"2-2/{at}/{MIDDLE:08d}", index), "pt") as file:
            keys = list(file.keys())
        own = dict(layer.named_parameters())
        assert {key.removeprefix("value/") for key in keys if key.startswith("value/")} == own.keys()
        state = {key.split("/")[1] for key in keys if key.startswith("state/")}
        assert state == {part for part, parameter in own.items() if parameter.requires_grad}


def resumed(rank, world, rendezvous, folder):
    join(rank, world, rendezvous)
    trained(rank, 1, 1, STEPS, folder, resume=True, frozen=FREEZES["the last layers"])


def test_state_of_a_parameter_that_is_frozen_by_now_is_refused(found, folder):
    found(2, 2)
    with pytest.raises(CheckpointError, match=r"layer 4 .* this model does not train: mix.bias/exp_avg"):
        run_processes(resumed, 1, str(folder / "2-2/0"))
