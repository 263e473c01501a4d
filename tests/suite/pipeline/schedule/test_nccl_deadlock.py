"""No schedule stops on NCCL, whichever cells skips connect; what would stop is refused. The player agrees with the
proof, and the proof with streams that run."""

import os
import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.schedule.action import Action, virtual_stages_of
from suite.pipeline.schedule.config import ScheduleConfig
from suite.pipeline.schedule.csv_file import read_rows
from suite.pipeline.schedule.flow_control import FlowControl, flow_control
from suite.pipeline.schedule.play import Route, play
from suite.pipeline.schedule.validate import validate
from tests.suite.pipeline.schedule.cuda_rules import launched
from tests.suite.pipeline.schedule.nccl_proof import draw_circle
from tests.suite.pipeline.schedule.test_schedule_mutations import legal_seed, mutated
from tests.suite.pipeline.torch_schedules import dump

POSTED_AHEAD = FlowControl(activation_recvs_ahead=2, gradient_recvs_ahead=2)
"""What costs nothing on gloo: all receives two ahead, those of gradients before the first forward."""

CASES = [
    ("fill_drain", 1), ("1f1b", 1), ("zero_bubble", 1), *(("zero_bubble", v) for v in (2, 3, 4)),
    *(("interleaved", v) for v in (2, 3, 4)),
]  # fmt: skip

EVERY = os.environ.get("EVERY_SCHEDULE") == "1"
"""All K up to 16 and M up to 64, which takes half an hour; a selection otherwise."""

STAGES = range(2, 17) if EVERY else (2, 3, 4, 8, 16)
MICRO_BATCHES = range(1, 65) if EVERY else (1, 2, 3, 5, 16, 33)


def schedules(name, virtual_stages):
    for stages in STAGES:
        for micro_batches in MICRO_BATCHES:
            if EVERY or stages * virtual_stages * micro_batches <= 600:
                yield ScheduleConfig(name, (1,), virtual_stages).build(stages, micro_batches)


@pytest.mark.timeout(0 if EVERY else 240)
@pytest.mark.parametrize(("name", "virtual_stages"), CASES)
def test_no_generated_schedule_stops(name, virtual_stages):
    """With one cell a stage not even if every launch waits for an idle device; with several, after the warm-up."""
    rules = [{"idle_waits": "first launch", "warms_up": True}]
    if virtual_stages == 1:
        rules.append({"idle_waits": "every launch"})
    tried = 0
    for schedule in schedules(name, virtual_stages):
        for rule in rules:
            assert launched(schedule, **rule).circle() == [], (len(schedule), rule)
            tried += 1
    print(f"{name}, {virtual_stages} cells a stage: {tried} tried")
    assert tried >= 15 * len(rules)


@pytest.mark.parametrize("virtual_stages", [1, 2, 3, 4])
def test_no_evaluation_stops(virtual_stages):
    for stages in STAGES:
        for micro_batches in (1, 2, 5, 16):
            name = "interleaved" if virtual_stages > 1 else "fill_drain"
            schedule = ScheduleConfig(name, (1,), virtual_stages).forward_only(stages, micro_batches)
            assert launched(schedule, idle_waits="first launch", warms_up=True).circle() == []


@pytest.mark.parametrize(("name", "virtual_stages"), CASES)
def test_receives_posted_ahead_stop_where_kernels_are_loaded_lazily(name, virtual_stages):
    for stages in (2, 3, 8):
        for micro_batches in (1, 2, 16):
            schedule = ScheduleConfig(name, (1,), virtual_stages).build(stages, micro_batches)
            assert launched(schedule, flow=POSTED_AHEAD, idle_waits="first launch").circle() != []
            assert launched(schedule, flow=POSTED_AHEAD).circle() == []


def test_a_circle_is_drawn_wait_by_wait():
    schedule = ScheduleConfig("1f1b").build(2, 1)
    assert draw_circle(launched(schedule, flow=POSTED_AHEAD, idle_waits="first launch").circle()) == (
        "stage 0: the receive of gradients 0 from stage 1\n"
        "  waits for stage 1: the send of gradients 0 to stage 0\n"
        "  waits for stage 1: B0\n"
        "  waits for stage 1: F0\n"
        "  waits for stage 1: the receive of activations 0 from stage 0\n"
        "  waits for stage 0: the send of activations 0 to stage 1\n"
        "  waits for stage 0: F0\n"
        "  waits for stage 0: F0 waits until the device is idle\n"
        "  waits for stage 0: the receive of gradients 0 from stage 1"
    )


pairs_of_cells = st.tuples(st.integers(0, 11), st.integers(0, 11)).map(sorted).map(tuple)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(CASES), st.integers(2, 4), st.integers(1, 12), st.sets(pairs_of_cells, max_size=12))
def test_skips_of_any_length_stop_nothing(case, stages, micro_batches, skips):
    name, virtual_stages = case
    count = stages * virtual_stages
    pairs = {(cell, cell + 1) for cell in range(count - 1)} | {(a, b) for a, b in skips if a < b < count}
    schedule = ScheduleConfig(name, (1,), virtual_stages).build(stages, micro_batches)
    assert launched(schedule, pairs, idle_waits="first launch", warms_up=True).circle() == []


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_schedules_of_torch_from_a_file_do_not_stop(name, tmp_path):
    for stages, micro_batches in ((2, 4), (4, 8)):
        rows = read_rows(dump(name, tmp_path / "torch.csv", stages, micro_batches))
        assert ScheduleConfig("csv", (1,), 2, rows, "nccl").actions(stages, micro_batches)


def in_blocks(*blocks):
    return [Action(kind, i) for kind, begin, end in blocks for i in range(begin, end)]


TOO_FAR_AHEAD = [
    in_blocks(("F", 0, 12), ("B", 0, 12)),
    in_blocks(("F", 0, 6), ("B", 0, 6), ("F", 6, 12), ("B", 6, 12)),
]
"""Stage 1 sends six gradients before stage 0 takes one: on gloo two receives are posted, and four sends in flight."""


def test_a_schedule_that_stops_on_nccl_alone_is_refused_there_alone():
    rows = tuple(" ".join(f"{k}{action}" for action in actions) for k, actions in enumerate(TOO_FAR_AHEAD))
    assert ScheduleConfig("csv", rows=rows).actions(2, 12)
    with pytest.raises(SettingError, match="stage 0 at B0, stage 1 at R5 wait for each other; at stage 0, 1 more"):
        ScheduleConfig("csv", rows=rows, transport="nccl").actions(2, 12)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_replica_without_micro_batches_has_nothing_to_run(transport):
    """Its stages have several cells all the same, which exchange messages on other replicas."""
    assert validate([[], []], 0, transport=transport, pairs=((0, 1), (1, 2), (2, 3))) == [[], []]


STOPS_WITH_A_SKIP = [
    in_blocks(("F", 0, 13), ("B", 0, 13)),
    in_blocks(("F", 0, 9), ("B", 0, 9), ("F", 9, 13), ("B", 9, 13)),
    in_blocks(("F", 0, 6), ("B", 0, 6), ("F", 6, 9), ("B", 6, 9), ("F", 9, 13), ("B", 9, 13)),
]
"""Stage 2 sends stage 0 six gradients of a skip before stage 0 takes one; five may be in flight."""


def test_a_schedule_that_stops_with_a_skip_alone_is_refused_with_it_alone():
    rows = tuple(" ".join(f"{k}{action}" for action in actions) for k, actions in enumerate(STOPS_WITH_A_SKIP))
    config = ScheduleConfig("csv", rows=rows, transport="nccl")
    assert config.actions(3, 13)
    with pytest.raises(SettingError, match="deadlocks: stage 0 at"):
        replace(config, pairs=((0, 1), (0, 2), (1, 2))).actions(3, 13)


SECOND_RECEIVE_TOO_LATE = (
    "0F1 0F0 0F5 1F1 0F4 0F2 0F6 1F0 1F5 1F4 0F3 1F2 1F6 1F3 1B0 0I0 0W0 1I1 1W1 0I1 0W1 1I2 1I3 0B2 0B3 1W2 1W3 1B4 "
    "0I4 0W4 1B5 0I5 0W5 1I6 0I6 0W6 1W6",
    "2F1 3F1 2F0 2F5 2F4 2F2 2F6 2F3 3F0 3F5 3I0 3I1 2I0 3F4 3W0 3F2 3B2 3F6 3W1 3F3 3I3 3I4 3I5 2W0 3I6 3W3 2I1 2W1 "
    "3W4 2I2 2I3 3W5 2W2 2I4 3W6 2I5 2I6 2W3 2W4 2W5 2W6",
)
"""Cell 1 posts the receive of cell 3's gradient when cell 2's has arrived; cell 3 sends too many before."""


def test_a_cell_posts_the_receive_of_a_second_message_when_the_first_has_arrived():
    config = ScheduleConfig("csv", (99,), 2, SECOND_RECEIVE_TOO_LATE, "nccl")
    assert config.actions(2, 7)
    with pytest.raises(SettingError, match="deadlocks: stage 0 at"):
        replace(config, pairs=((1, 2), (1, 3))).actions(2, 7)


def test_a_cell_receives_nothing_before_the_cell_before_it_has_begun():
    """Cell 2 waits for the metadata of cell 1, begun on stage 0 when six messages of a skip from cell 0 are sent."""

    def schedule(micro_batches):
        cells = [[f"{cell}F{i}" for i in range(micro_batches)] for cell in range(4)]
        back = [[f"{cell}B{i}" for i in range(micro_batches)] for cell in range(4)]
        rows = (" ".join(cells[0] + cells[1] + back[1] + back[0]), " ".join(cells[2] + cells[3] + back[3] + back[2]))
        return ScheduleConfig("csv", (99,), 2, rows, pairs=((0, 2), (1, 2)))

    assert schedule(5).actions(2, 5)
    with pytest.raises(SettingError, match=r"deadlocks: stage 0 at F0\.1, stage 1 at F0 wait"):
        schedule(6).actions(2, 6)


@pytest.mark.slow
def test_too_few_hardware_queues_stop_stages_of_several_cells_and_a_queue_for_each_stream_stops_none():
    for name, virtual_stages in CASES:
        for stages in (2, 3, 4):
            schedule = ScheduleConfig(name, (1,), virtual_stages).build(stages, 16)
            streams = 1 + 2 * max(_links(k, stages, virtual_stages) for k in range(stages))
            stops = [bool(launched(schedule, queues=queues).circle()) for queues in range(1, streams + 1)]
            assert not stops[-1]
            assert any(stops) == (virtual_stages > 1)


def _links(k, stages, virtual_stages):
    return sum(k in (cell % stages, (cell + 1) % stages) for cell in range(stages * virtual_stages - 1))


class Device:
    """Streams of one stage that run one operation at a time, knowing nothing of graphs.

    The compute stream has computations and waits for messages; a message's stream begins it once the compute stream has
    come to where it stood at the launch.
    """

    def __init__(self, k, actions, stages, flow):
        self.k, self.stages, self.cells = k, stages, stages * (1 + max((a.virtual_stage for a in actions), default=0))
        self.compute, self.done = [], 0
        self.streams = {}
        in_flight = {}
        receives = {}
        for action in actions:
            cell = action.virtual_stage * stages + k
            if cell not in in_flight:
                in_flight[cell] = [None] * (cell + 1 < self.cells and stages > 1)  # the metadata
                forwards = [a.micro_batch for a in actions if a.kind == "F" and a.virtual_stage == action.virtual_stage]
                receives[cell] = deque((cell - 1, cell, i) for i in forwards) if self.other(cell - 1) else deque()
                self.begin_next(receives[cell])
            if action.kind == "F" and self.other(cell - 1):
                self.compute.append((cell - 1, cell, action.micro_batch))
                self.begin_next(receives[cell])
            elif action.direction < 0 and self.other(cell + 1):
                self.begin((cell + 1, cell, action.micro_batch))
                self.compute.append((cell + 1, cell, action.micro_batch))
            self.compute.append(action)
            if action.direction and self.other(cell + action.direction):
                message = cell, cell + action.direction, action.micro_batch
                self.begin(message)
                in_flight[cell].append(message)
                if len(in_flight[cell]) > flow.max_inflight_sends:
                    self.compute += filter(None, [in_flight[cell].pop(0)])

    def other(self, cell):
        return 0 <= cell < self.cells and cell % self.stages != self.k

    def begin_next(self, receives):
        if receives:
            self.begin(receives.popleft())

    def begin(self, message):
        self.streams.setdefault(message[:2], deque()).append((message, len(self.compute)))

    def stands_at(self, message):
        stream = self.streams.get(message[:2])
        return bool(stream) and stream[0][0] == message and stream[0][1] <= self.done


def runs_to_the_end(schedule, rng):
    """Plays the streams in random order; returns whether all finish."""
    stages = len(schedule)
    flow = flow_control("nccl", stages, virtual_stages_of(schedule))
    devices, arrived = [Device(k, actions, stages, flow) for k, actions in enumerate(schedule)], set()
    progress = True
    while progress:
        progress = False
        for device in rng.sample(devices, stages):
            while device.done < len(device.compute):
                operation = device.compute[device.done]
                if not isinstance(operation, Action) and operation not in arrived:
                    break
                device.done += 1
                progress = True
            for stream in device.streams.values():
                while stream and device.stands_at(stream[0][0]):
                    message = stream[0][0]
                    other = devices[(message[0] if message[0] % stages != device.k else message[1]) % stages]
                    if not other.stands_at(message):
                        break
                    stream.popleft()
                    other.streams[message[:2]].popleft()
                    arrived.add(message)
                    progress = True
    return all(device.done == len(device.compute) and not any(device.streams.values()) for device in devices)


def player_stops(schedule, pairs=()):
    """Whether the player stops on NCCL."""
    cells = len(schedule) * virtual_stages_of(schedule)
    routes = [Route(*pair) for pair in sorted({(at, at + 1) for at in range(cells - 1)} | set(pairs))]
    flow = flow_control("nccl", len(schedule), virtual_stages_of(schedule))
    return bool(play(schedule, dict.fromkeys("FfRIBW", [1.0] * cells), routes, flow).stuck)


def test_the_player_and_the_proof_agree_with_streams_that_run():
    """On schedules and their mutations that pass every other check; far-ahead ones stop often."""
    rng, found = random.Random(35), Counter()
    while found.total() < (20_000 if EVERY else 2_000):
        schedule, micro_batches, train = legal_seed(rng)
        if train and rng.random() < 0.7:
            schedule = mutated(schedule, micro_batches, rng)
        elif train and len(schedule) > 1:
            schedule, micro_batches = far_ahead(rng)
        try:
            validate(schedule, micro_batches, train)
        except SettingError:
            continue
        ends = runs_to_the_end(schedule, rng)
        assert ends == (launched(schedule).circle() == []), schedule
        assert ends == (not player_stops(schedule)), schedule
        found[ends] += 1
    print(f"{found[True]} end, {found[False]} stop")
    assert min(found.values()) >= found.total() // 50, found


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False), st.sets(pairs_of_cells, max_size=4))
def test_the_player_agrees_with_the_proof_where_skips_pass_stages(rng, skips):
    schedule, _ = far_ahead(rng)
    count = len(schedule)
    pairs = {(cell, cell + 1) for cell in range(count - 1)} | {(a, b) for a, b in skips if a < b < count}
    assert player_stops(schedule, pairs) == bool(launched(schedule, pairs).circle())


def far_ahead(rng):
    """Returns a schedule of stages that run blocks of forwards and of backwards; the later the stage, the more."""
    micro_batches, stages = rng.randint(6, 14), rng.choice([2, 2, 3])
    schedule = []
    ends = [micro_batches]
    for _ in range(stages):
        blocks = [(kind, a, b) for a, b in zip([0, *ends], ends, strict=False) for kind in "FB"]
        schedule.append(in_blocks(*blocks))
        ends = sorted({*ends, rng.randint(1, micro_batches)})
    return schedule, micro_batches
