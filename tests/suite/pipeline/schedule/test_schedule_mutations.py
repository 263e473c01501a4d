"""The validator against the proof that a step ends, on mutations of legal schedules, on gloo and NCCL, with skips."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from suite.errors import SettingError
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import parse_rows
from suite.pipeline.schedule.flow_control import flow_control
from suite.pipeline.schedule.remat import UNLIMITED
from suite.pipeline.schedule.validate import validate
from tests.marks import slow_but_for
from tests.suite.pipeline.random_pipelines import draw_rows
from tests.suite.pipeline.schedule.nccl_proof import launched, with_neighbours

COMPLETE = {True: {"FB", "FRB", "FIW", "FRIW"}, False: {"F"}}
"""What a cell may have done with a micro-batch when all is over, to train or to evaluate."""


def is_legal(schedule, micro_batches, train, transport, pairs):
    """Whether each cell completes each micro-batch, neighbours agree on the order of their messages, and no stage waits
    for ever."""
    stages, cells = len(schedule), len(schedule) * virtual_stages_of(schedule)
    done = {(cell, i): "" for cell in range(cells) for i in range(micro_batches)}
    orders = defaultdict(list)  # the micro-batches of forwards and of backwards, by cell
    for k, actions in enumerate(schedule):
        for action in actions:
            cell = action.virtual_stage * stages + k
            if (cell, action.micro_batch) not in done:
                return False
            done[cell, action.micro_batch] += action.kind
            orders[cell, {"F": 1, "B": -1, "I": -1}.get(action.kind)].append(action.micro_batch)
    agree = all(orders[cell, way] == orders[cell + 1, way] for cell in range(cells - 1) for way in (1, -1))
    if not agree or not COMPLETE[train].issuperset(done.values()):
        return False
    flow = flow_control(transport, stages, virtual_stages_of(schedule))
    return not launched(schedule, flow, pairs).circle()


def random_schedule(stages, micro_batches, train, rng):
    """Returns actions in any order, with recomputes of a random share of micro-batches; of an evaluation only F."""
    schedule = parse_rows(draw_rows(rng, tuple(range(stages)), micro_batches))
    again = {i for i in range(micro_batches) if rng.random() < rng.choice([0, 0.5, 1])}
    for actions in schedule:
        for action in [action for action in actions if action.micro_batch in again and action.kind in "BI"]:
            first = actions.index(replace(action, kind="F")) + 1
            actions.insert(rng.randint(first, actions.index(action)), replace(action, kind="R"))
    return schedule if train else [[action for action in actions if action.kind == "F"] for actions in schedule]


def far_ahead(rng):
    """Returns stages that run blocks of forwards and of backwards; the later the stage, the more. On NCCL they often
    wait for ever."""
    micro_batches, stages = rng.randint(6, 14), rng.choice([2, 3, 3])
    schedule = []
    ends = [micro_batches]
    for _ in range(stages):
        blocks = [(kind, a, b) for a, b in zip([0, *ends], ends, strict=False) for kind in "FB"]
        schedule.append([Action(kind, i) for kind, begin, end in blocks for i in range(begin, end)])
        ends = sorted({*ends, rng.randint(1, micro_batches)})
    return schedule, micro_batches


def drawn_schedule(rng):
    """Returns a schedule that is legal, but for those that run far ahead; its number of micro-batches, and whether it
    trains."""
    stages, micro_batches = rng.choice([1, 2, 3, 3, 4, 4, 5]), rng.choice([1, 2, 3, 3, 4, 4, 5, 6])
    named = ["fill_drain", "1f1b", "zero_bubble", "interleaved"]
    maker = rng.choice([*named, *["random"] * 4, *["far_ahead"] * 4, "forward_only", "forward_walk"])
    if maker == "far_ahead":
        return *far_ahead(rng), True
    if maker in named:
        virtual_stages = {"interleaved": rng.choice([2, 3]), "zero_bubble": rng.choice([1, 2])}.get(maker, 1)
        schedule_config = ScheduleConfig(maker, (rng.choice([0, 1, 2, UNLIMITED]),), virtual_stages)
        return schedule_config.actions(max(stages, virtual_stages), micro_batches), micro_batches, True
    if maker == "random":
        return random_schedule(stages, micro_batches, True, rng), micro_batches, True
    if maker == "forward_only":
        return ScheduleConfig().forward_only(stages, micro_batches), micro_batches, False
    return random_schedule(stages, micro_batches, False, rng), micro_batches, False


def some_stage(schedule, rng):
    return rng.choice([actions for actions in schedule if actions] or [[Action("F", 0)]])


def swap(schedule, micro_batches, rng):
    """Two actions of a stage, every second time neighbours."""
    actions = some_stage(schedule, rng)
    i = rng.randrange(len(actions))
    j = rng.choice([i - 1, rng.randrange(len(actions))])
    actions[i], actions[j] = actions[j], actions[i]


def move(schedule, micro_batches, rng):
    """An action to anywhere, every second time near."""
    actions = some_stage(schedule, rng)
    i = rng.randrange(len(actions))
    to = rng.choice([max(0, i + rng.randint(-3, 3)), rng.randint(0, len(actions))])
    actions.insert(to, actions.pop(i))


def drift(schedule, micro_batches, rng):
    """An action passes neighbours of other kinds and micro-batches: only waits change, for better or for ever."""
    actions = some_stage(schedule, rng)

    def passes(i):
        return actions[i].kind != actions[i + 1].kind and actions[i].micro_batch != actions[i + 1].micro_batch

    places = [i for i in range(len(actions) - 1) if passes(i)]
    if places:
        i, way = rng.choice(places), rng.choice([-1, 1])
        while 0 <= i < len(actions) - 1 and passes(i) and rng.random() < 0.9:
            actions[i], actions[i + 1] = actions[i + 1], actions[i]
            i += way


def delete(schedule, micro_batches, rng):
    actions = some_stage(schedule, rng)
    del actions[rng.randrange(len(actions))]


def delete_a_recompute(schedule, micro_batches, rng):
    actions = some_stage(schedule, rng)
    recomputes = [i for i, action in enumerate(actions) if action.kind == "R"]
    if recomputes:
        del actions[rng.choice(recomputes)]


def insert(schedule, micro_batches, rng):
    """A new action, or one that is there already."""
    actions = rng.choice(schedule)
    new = Action(rng.choice("FRIBW"), rng.randint(-1, micro_batches))
    actions.insert(rng.randint(0, len(actions)), rng.choice([new, *actions]))


def insert_a_recompute(schedule, micro_batches, rng):
    """Before a backward or after another action of its micro-batch: a new recompute, a second, or one to evaluate."""
    actions = some_stage(schedule, rng)
    i = rng.randrange(len(actions))
    actions.insert(i + (actions[i].kind not in "IB"), Action("R", actions[i].micro_batch, actions[i].virtual_stage))


def change(schedule, micro_batches, rng):
    """The kind of an action, or its micro-batch."""
    actions = some_stage(schedule, rng)
    i = rng.randrange(len(actions))
    numbers = rng.choice([{"kind": rng.choice("FRIBW")}, {"micro_batch": rng.randint(-1, micro_batches)}])
    actions[i] = replace(actions[i], **numbers)


def swap_stages(schedule, micro_batches, rng):
    i, j = rng.randrange(len(schedule)), rng.randrange(len(schedule))
    schedule[i], schedule[j] = schedule[j], schedule[i]


def exchange_everywhere(schedule, micro_batches, rng):
    """The same two micro-batches in every stage: neighbours go on agreeing about their messages."""
    kinds = rng.choice(["F", "IB", "FIB", "FRIBW"])
    i, j = rng.randrange(micro_batches), rng.randrange(micro_batches)
    for actions in schedule:
        for at, action in enumerate(actions):
            if action.kind in kinds:
                actions[at] = replace(action, micro_batch={i: j, j: i}.get(action.micro_batch, action.micro_batch))


COARSE = [swap, move, delete, insert, change]
FINE = [drift, drift, drift, delete_a_recompute, insert_a_recompute, exchange_everywhere, swap_stages]
"""Those that often leave a schedule legal, or break nothing but what stages have to agree about."""


def mutated(schedule, micro_batches, rng):
    """Returns another schedule, one to three mutations away."""
    mutant = [list(actions) for actions in schedule]
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        rng.choice(COARSE * 2 + FINE * 5)(mutant, micro_batches, rng)
    return mutant if mutant != schedule else mutated(schedule, micro_batches, rng)


def candidates(rng, count):
    """Yields so many different schedules, one as it is drawn and four mutants of it, each with its number of
    micro-batches and whether it trains."""
    seen = set()
    while len(seen) < count:
        seed, micro_batches, train = drawn_schedule(rng)
        for candidate in (seed, *(mutated(seed, micro_batches, rng) for _ in range(4))):
            key = (show(candidate), micro_batches, train)
            if key not in seen and len(seen) < count:
                seen.add(key)
                yield candidate, micro_batches, train


def show(schedule):
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def verdict(*arguments):
    """Returns "legal", or which complaint the validator makes."""
    try:
        validate(*arguments)
    except SettingError as error:
        return next(what for what in COMPLAINTS if what in str(error))
    return "legal"


COMPLAINTS = [
    "never runs", "more than once", "micro-batches", "in an evaluation", "out of order",
    "order of activations", "order of gradients", "deadlocks",
]  # fmt: skip


@pytest.mark.parametrize("count", slow_but_for([1000], [1000, 10_000]))
def test_the_validator_accepts_exactly_what_can_run(count):
    """Every second schedule has skips."""
    rng, heard = random.Random(20), Counter()
    for schedule, micro_batches, train in candidates(rng, count):
        transport, cells = rng.choice(["gloo", "nccl"]), range(len(schedule) * virtual_stages_of(schedule))
        skips = [sorted(rng.sample(cells, 2)) for _ in range(rng.choice([0, 0, 2, 4]))] if len(cells) > 2 else []
        pairs = with_neighbours(skips, len(cells))
        found = verdict(schedule, micro_batches, train, transport, pairs)
        legal = is_legal(schedule, micro_batches, train, transport, pairs)
        case = f"M = {micro_batches}, train = {train}, {transport}, {sorted(pairs)}\n{show(schedule)}"
        assert legal == (found == "legal"), f"legal: {legal}, the validator says {found}: {case}"
        heard[found] += 1
        if found == "deadlocks" and transport == "nccl":
            heard["on NCCL alone"] += verdict(schedule, micro_batches, train, "gloo", pairs) == "legal"
    # many of both, and every complaint heard often: else the above would say little
    assert count / 4 < heard["legal"] < 3 * count / 4, heard
    assert all(heard[what] >= count / 125 for what in [*COMPLAINTS, "on NCCL alone"]), heard
