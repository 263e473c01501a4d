"""The validator against a machine of queues that knows nothing of it, on mutations of legal schedules."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from suite.errors import SettingError
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import parse_rows
from suite.pipeline.schedule.flow_control import GLOO
from suite.pipeline.schedule.remat import UNLIMITED
from tests.marks import slow_but_for
from tests.suite.pipeline.random_pipelines import draw_rows
from tests.suite.pipeline.schedule_helpers import validate

COMPLETE = {True: {"FB", "FRB", "FIW", "FRIW"}, False: {"F"}}
"""What a stage may have done with a micro-batch when all is over, to train or to evaluate."""


class RuleBrokenError(Exception):
    pass


class Machine:
    """K stages of one or more cells, with a queue for each direction between neighbouring cells. It does one action at
    a time. A stage goes on only while all but the last few messages of the cell that it worked in have a receive."""

    def __init__(self, stages, micro_batches, train, virtual_stages=1):
        self.stages, self.cells, self.complete = stages, stages * virtual_stages, COMPLETE[train]
        self.history = [dict.fromkeys(range(micro_batches), "") for _ in range(self.cells)]
        self.activations = [deque() for _ in range(self.cells - 1)]  # [c] from cell c to c + 1
        self.gradients = [deque() for _ in range(self.cells - 1)]  # [c] from cell c + 1 to c
        self.taken = Counter()  # messages by queue
        self.sent = [[] for _ in range(self.cells)]  # by cell: (queue, its taker, number)
        self.last = [None] * stages  # the cell that a stage worked in last

    def cell(self, k, action):
        return action.virtual_stage * self.stages + k

    def queues(self, kind, c):
        """Returns the queue that the action takes from and the one it appends to, None where there is none."""
        below = None if c == 0 else c - 1
        above = None if c == self.cells - 1 else c
        none, backward = (None, None, None), (self.gradients, above, below)
        ends = {"F": (self.activations, below, above), "B": backward, "I": backward, "R": none, "W": none}
        links, source, target = ends[kind]
        return tuple(None if at is None else links[at] for at in (source, target))

    def free(self, k, action):
        """Whether a stage that comes to ``action`` is done with its last message."""
        cell = self.last[k]
        for queue, taker, number in self.sent[cell][: -GLOO.max_inflight_sends] if cell is not None else ():
            opened = taker < self.stages or taker in self.opened
            if not opened or number >= self.taken[id(queue)] + GLOO.recvs_ahead(1):
                return False
        return True

    def act(self, k, action):
        """Does the action, or returns False if it must wait. Raises RuleBrokenError if it never may."""
        cell = self.cell(k, action)
        if not 0 <= cell < self.cells or action.micro_batch not in self.history[cell]:
            raise RuleBrokenError(f"stage {k}: there is no micro-batch of {action}")
        source, target = self.queues(action.kind, cell)
        if not self.free(k, action) or (source is not None and not source):
            return False
        if source is not None:
            self.taken[id(source)] += 1
            if source.popleft() != action.micro_batch:
                raise RuleBrokenError(f"stage {k}: another micro-batch stands before that of {action}")
        past = self.history[cell][action.micro_batch] + action.kind
        if not any(whole.startswith(past) for whole in self.complete):
            raise RuleBrokenError(f"stage {k}: {past}")
        self.history[cell][action.micro_batch] = past
        if target is not None:
            target.append(action.micro_batch)
            taker = cell + {"F": 1, "B": -1, "I": -1}[action.kind]
            number = sum(queue is target for queue, _, _ in self.sent[cell])
            self.sent[cell].append((target, taker, number))
        self.last[k] = cell if action.kind in "FIB" else None
        return True

    opened = frozenset()
    """Cells of later virtual stages that their stages have come to."""

    def finished(self):
        return all(past in self.complete for cell in self.history for past in cell.values())


def is_legal(schedule, micro_batches, train, rng):
    """Runs the stages in random order until all have ended, none can go on, or a rule is broken."""
    machine = Machine(len(schedule), micro_batches, train, virtual_stages_of(schedule))
    rest = {k: deque(actions) for k, actions in enumerate(schedule) if actions}
    seen = set()
    asleep = set()  # an action that must wait can go on only after another was done
    while len(asleep) < len(rest):
        k = rng.choice([k for k in rest if k not in asleep])
        machine.opened |= {machine.cell(k, rest[k][0])}
        try:
            went = machine.act(k, rest[k][0])
        except RuleBrokenError:
            return False
        if not went:
            if machine.cell(k, rest[k][0]) not in seen:  # it was opened just now, which another may wait for
                asleep.clear()
            seen.add(machine.cell(k, rest[k][0]))
            asleep.add(k)
            continue
        asleep.clear()
        rest[k].popleft()
        if not rest[k]:
            del rest[k]
    legal = not rest and machine.finished()
    assert not legal or not any(machine.activations + machine.gradients)
    return legal


def random_schedule(stages, micro_batches, train, rng):
    """Returns actions in any order, with recomputes of a random share of micro-batches; of an evaluation only F."""
    schedule = parse_rows(draw_rows(rng, tuple(range(stages)), micro_batches))
    again = {i for i in range(micro_batches) if rng.random() < rng.choice([0, 0.5, 1])}
    for actions in schedule:
        for action in [action for action in actions if action.micro_batch in again and action.kind in "BI"]:
            first = actions.index(replace(action, kind="F")) + 1
            actions.insert(rng.randint(first, actions.index(action)), replace(action, kind="R"))
    return schedule if train else [[action for action in actions if action.kind == "F"] for actions in schedule]


def legal_seed(rng):
    """Returns a legal schedule, its number of micro-batches, and whether it trains."""
    stages, micro_batches = rng.choice([1, 2, 3, 3, 4, 4, 5]), rng.choice([1, 2, 3, 3, 4, 4, 5, 6])
    named = ["fill_drain", "1f1b", "zero_bubble", "interleaved"]
    maker = rng.choice([*named, *["random"] * 4, "forward_only", "forward_walk"])
    if maker in named:
        virtual_stages = {"interleaved": 2, "zero_bubble": rng.choice([1, 2])}.get(maker, 1)
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


def mutants(rng, count):
    """Yields so many different mutants, four a seed, each with its number of micro-batches and whether it trains."""
    seen = set()
    while len(seen) < count:
        seed, micro_batches, train = legal_seed(rng)
        for _ in range(4):
            mutant = mutated(seed, micro_batches, rng)
            key = (show(mutant), micro_batches, train)
            if key not in seen and len(seen) < count:
                seen.add(key)
                yield mutant, micro_batches, train


def verdict(schedule, micro_batches, train):
    """Returns the validator's timeline or its complaint."""
    try:
        return validate(schedule, micro_batches, train), None
    except SettingError as error:
        return None, str(error)


def assert_played_as_early_as_can_be(schedule, timeline):
    """An action comes right after the later of the stage's last action and the arrival of what it needs."""
    stages, cells = len(schedule), len(schedule) * virtual_stages_of(schedule)
    when = {}
    for k, row in enumerate(timeline):
        for unit, shown in enumerate(row):
            if shown != ".":
                action = Action.parse(shown)
                when[action.direction, action.micro_batch, action.virtual_stage * stages + k] = unit
    for k, (actions, row) in enumerate(zip(schedule, timeline, strict=True)):
        assert [cell for cell in row if cell != "."] == [str(action) for action in actions]
        last = -1
        for action in actions:
            cell = action.virtual_stage * stages + k
            source = cell + {"F": -1, "B": 1, "I": 1}.get(action.kind, 0)
            waits = source != cell and 0 <= source < cells
            needs = when[action.direction, action.micro_batch, source] if waits else -1
            last = max(last, needs) + 1
            assert timeline[k][last] == str(action)
    assert {len(row) for row in timeline} == {1 + max(when.values(), default=-1)}


def show(schedule):
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


COMPLAINTS = [
    "never runs", "more than once", "micro-batches", "in an evaluation", "out of order",
    "order of activations", "order of gradients", "deadlocks",
]  # fmt: skip


@pytest.mark.parametrize("mutations", slow_but_for([1000], [1000, 10_000]))
def test_the_validator_accepts_exactly_what_the_machine_can_run(mutations):
    rng = random.Random(20)
    count = Counter()
    for case, (mutant, micro_batches, train) in enumerate(mutants(rng, mutations)):
        legal = is_legal(mutant, micro_batches, train, rng)
        timeline, complaint = verdict(mutant, micro_batches, train)
        description = f"{case}: M = {micro_batches}, train = {train}, legal = {legal}, said {complaint}\n{show(mutant)}"
        assert legal == (complaint is None), description
        if legal:
            assert_played_as_early_as_can_be(mutant, timeline)
        count["legal" if legal else next(what for what in COMPLAINTS if what in complaint)] += 1
    # Many of both, and every complaint heard often: else the above would say little.
    assert count.total() == mutations
    assert mutations / 4 < count["legal"] < 3 * mutations / 4, count
    assert all(count[what] >= mutations / 125 for what in COMPLAINTS), count


def test_every_seed_is_legal():
    rng = random.Random(0)
    for _ in range(200):
        schedule, micro_batches, train = legal_seed(rng)
        assert is_legal(schedule, micro_batches, train, rng), show(schedule)
        assert_played_as_early_as_can_be(schedule, validate(schedule, micro_batches, train))
