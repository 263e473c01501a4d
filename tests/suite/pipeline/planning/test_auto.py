"""What ``auto`` chooses, schedule and recomputation, compared with every possible choice."""

from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from suite.errors import PlanError
from suite.pipeline.planning.costs import SkipInput
from suite.pipeline.planning.devices import Machine
from suite.pipeline.planning.fit import MemoryFit, Problem
from suite.pipeline.planning.memory import UNCOUNTED_BYTES
from suite.pipeline.planning.plan import make_plan
from suite.pipeline.planning.stage_bytes import peak_bytes
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.remat import UNLIMITED
from suite.settings import PipelineSettings
from tests.suite.pipeline.planning import costs

ROOMY = 1 << 50
ONE_CELL = (("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1))
CHOICES = (*ONE_CELL, ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2), ("v_half", 2), ("v_min", 2))


def layer(weight=1.0, **numbers):
    """F and R ``weight``, B twice that, half of it deferred if need be; a boundary of 10 bytes, activations of 100."""
    sizes = {
        "boundary_bytes": 10, "gradient_bytes": 10, "activation_bytes": 100, "forward_peak_bytes": 20,
        "graph_peak_bytes": 100, "backward_peak_bytes": 20, "weight_grad_s": weight, "deferred_bytes": 40,
    }  # fmt: skip
    return costs.layer(weight, **sizes | numbers)


def kind(plan):
    return plan.schedule_config.schedule, plan.schedule_config.virtual_stages


def plan(costs, room=ROOMY, **pipeline):
    return make_plan(
        Problem(costs, PipelineSettings(**pipeline), 1.0, Machine(memory_limit_bytes=UNCOUNTED_BYTES + room))
    )


@st.composite
def random_layer(draw):
    activation_bytes, boundary_bytes = draw(st.integers(0, 90)), draw(st.integers(1, 20))
    sizes = dict.fromkeys(("activation_bytes", "graph_peak_bytes"), activation_bytes)
    sizes |= dict.fromkeys(("boundary_bytes", "gradient_bytes"), boundary_bytes)
    return layer(draw(st.integers(1, 9)), deferred_bytes=draw(st.integers(0, 60)), **sizes)


layers = st.lists(random_layer(), min_size=2, max_size=10)
remats = st.sampled_from(["always", "except_last", "never", "auto"])


@settings(max_examples=16)
@given(layers, st.integers(1, 4), st.integers(1, 8), remats, st.integers(50, 3_000))
def test_auto_is_the_fastest_that_fits_and_never_exceeds_the_memory(costs, stages, micro_batches, remat, room):
    asked = {"stages": min(stages, len(costs)), "micro_batches": micro_batches, "remat": remat}
    each = []
    for name, virtual_stages in CHOICES:
        with suppress(PlanError):
            each.append(plan(costs, room, **asked, schedule=name, virtual_stages=virtual_stages))
    if not each:  # a search may find one that fits
        with suppress(PlanError):
            found = plan(costs, room, **asked, schedule="auto")
            assert found.schedule_config.schedule == "search"
            assert all(stage.peak_bytes <= UNCOUNTED_BYTES + room for stage in found.cells)
        return
    found = plan(costs, room, **asked, schedule="auto")
    assert found.step_s == min(one.step_s for one in each)
    assert all(stage.peak_bytes <= UNCOUNTED_BYTES + room for stage in found.cells)
    assert kind(found) == (found.pipeline.schedule, found.pipeline.virtual_stages) in CHOICES


@settings(max_examples=25)
@given(
    layers,
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(["fill_drain", "1f1b", "zero_bubble"]),
    st.integers(50, 3_000),
)
def test_one_graph_more_on_any_stage_would_not_fit(costs, stages, micro_batches, name, room):
    asked = {"stages": min(stages, len(costs)), "micro_batches": micro_batches, "schedule": name}
    try:
        found = plan(costs, room, **asked, remat="auto")
    except PlanError:
        return
    assume(any(most != UNLIMITED for most in found.schedule_config.max_live_graphs))
    fit = MemoryFit(Problem(costs, PipelineSettings(**asked, remat="auto"), 1.0, Machine(UNCOUNTED_BYTES + room)))
    stages_bytes = fit.stage_bytes([range(cell.begin, cell.end) for cell in found.cells])
    for k in range(len(found.cells)):
        max_live_graphs = found.schedule_config.max_live_graphs_of(k, len(found.cells))[0]
        if max_live_graphs == UNLIMITED:
            continue
        more = ScheduleConfig(name, (max_live_graphs + 1,)).actions(len(found.cells), micro_batches)[k]
        assert peak_bytes(more, stages_bytes[k], fit.flow) > UNCOUNTED_BYTES + room


def test_with_memory_to_spare_nothing_is_recomputed():
    for name, virtual_stages in CHOICES:
        asked = {"stages": 4, "micro_batches": 8, "remat": "auto"}
        found = plan([layer()] * 8, **asked, schedule=name, virtual_stages=virtual_stages)
        assert found.recomputes == (0, 32 * virtual_stages)


def test_schedules_by_hand():
    """K = 4 equal stages, M = 8, F = R = 1, B = 2, of that 1 deferred."""
    costs = [layer()] * 4
    spare, tight = ({"stages": 4, "micro_batches": 8, "remat": remat} for remat in ("auto", "except_last"))
    assert plan(costs, **spare, schedule="fill_drain").step_s == (8 + 3) * 3
    assert plan(costs, **tight, schedule="fill_drain").step_s == (8 + 3) * 3 + 7
    assert plan(costs, **spare, schedule="1f1b").step_s == (8 + 3) * 3
    assert plan(costs, **spare, schedule="zero_bubble").step_s == 8 * 3 + 3
    auto = plan(costs, **spare, schedule="auto")
    assert kind(auto) == ("zero_bubble", 1)  # four layers are four cells
    costs = [layer(weight=0.5)] * 8
    auto = plan(costs, **spare, schedule="auto")
    assert kind(auto) == ("zero_bubble", 2)
    assert auto.step_s == 8 * 3 + 1.5  # filled by cells half as long


def test_of_equal_ones_the_papers_is_taken():
    costs = [layer(weight_grad_s=0.0, deferred_bytes=0)]
    assert kind(plan(costs, stages=1, micro_batches=4, remat="never", schedule="auto")) == ("fill_drain", 1)


def test_interleaving_is_for_models_with_skips_too():
    costs = [layer(weight=0.5) for _ in range(7)] + [layer(weight=0.5, skip_inputs=(SkipInput(2, 10, 10, True),))]
    assert plan(costs, stages=2, schedule="interleaved", virtual_stages=2).schedule_config.virtual_stages == 2
    assert kind(plan(costs, stages=4, micro_batches=8, schedule="auto"))[1] == 2


def test_a_schedule_that_cannot_be_is_a_fault_of_the_plan():
    with pytest.raises(PlanError, match=r"use pipeline.virtual_stages=2"):
        plan([layer()] * 4, stages=2, schedule="interleaved")
