"""A short version of tests/slow: a run with injected faults recovers, with the same result as without faults."""

import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from launch import interrupts
from launch.backends.processes import LocalLauncher
from launch.supervision.attempt_log import read_attempt_lines
from launch.supervision.supervisor import Supervisor
from launch.supervision.watchdog import Watchdog
from launch.watching.run_data import RunData
from launch.watching.run_page import slow_workers
from launch.worker.attempt import run_logger
from suite.errors import FailureLocation, ProgramError, SettingError, WorkerError
from suite.training.metrics import SLOW, read_steps, stage_metric
from suite.training.pace import FACTOR
from tests.faults import bad_node, injection
from tests.faults.injection import VARIABLE
from tests.slow.trial import Trial, Trials, Watched, assert_same, newest

STEPS = "train.steps=6 train.checkpoint_every=2 train.validate_every=2 pipeline.stages=2 pipeline.micro_batches=2"


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("supervised"))


def test_a_killed_and_a_suspended_worker_are_replaced_and_the_result_is_bit_identical(trials, monkeypatch):
    undisturbed = trials.train(monkeypatch, STEPS)
    assert undisturbed.error is None
    assert [line["outcome"] for line in undisturbed.ends] == ["done"]
    struck = trials.train(monkeypatch, STEPS, [
        {"fault": "kill", "stage": 1, "step": 3, "action": "B1"},
        {"fault": "stop", "stage": 0, "step": 5, "action": "F1", "attempt": 2},
    ])  # fmt: skip
    assert struck.error is None, struck.said
    first, second, third = struck.ends
    assert (first["kind"], first["stage"], first["step"], first["action"]) == ("death", 1, 4, "B1")
    assert "replica 0, stage 1 on" in first["message"]
    assert "its process was killed by SIGKILL, last seen at B1 of step 4" in first["message"]
    assert (second["kind"], second["stage"], second["step"], second["action"]) == ("stall", 0, 6, "F1")
    assert "has sent no heartbeat for" in second["message"]
    assert "[F1]" in second["message"]
    assert third["outcome"] == "done"
    assert [end["start"] for end in struck.ends] == struck.published
    assert struck.published[1] in (0, 2)  # a checkpoint is written while the next steps are done
    assert struck.published[2] in (2, 4)
    assert "training again" in struck.said
    assert_same(struck, undisturbed)


def test_an_exception_in_a_layer_is_reported_with_the_layer_and_retried_once(trials, monkeypatch):
    struck = trials.train(
        monkeypatch, STEPS, [{"fault": "raise", "attempt": None, "stage": 1, "step": 3, "action": "F1", "layer": 5}]
    )
    assert isinstance(struck.error, WorkerError)
    for words in (
        "replica 0, stage 1 on",
        "F1 of step 4, micro-batch 1, in layer 5 (",
        "InjectedError: a planned exception",
        "Attempt 2 was the last: the same failure occurred twice in a row in the same place",
        "gpipe resume ",
    ):
        assert words in str(struck.error)
    assert [line["kind"] for line in struck.ends] == ["program", "program"]


@pytest.mark.parametrize(("written", "left"), [(None, False), ('{"steps": 6}', True)], ids=["running", "finished"])
def test_a_record_of_later_steps_goes_with_the_first_step_and_one_of_this_attempt_stays(trials, written, left):
    """A short attempt can be finished before its first step is noticed."""
    experiment, plan, attempt = trials.job(STEPS)
    attempt.run.record.write_text('{"steps": 8}')

    class Finishing:
        def run(self, attempt, experiment, watchdog):
            if written is not None:
                attempt.run.record.write_text(written)
            watchdog._on_first_step(4)

    resumed = replace(attempt, resume=True, checkpoint_step=4)
    Supervisor(experiment, plan, resumed, Finishing(), None, print).run()
    assert attempt.run.record.exists() == left


class Devices:
    """Two spare nodes; some fail whatever runs on them, in the same place or at others."""

    def __init__(self, bad, spares=2, moves=False, busy=0):
        self.node, self.bad, self.spares, self.moves, self.busy = 0, bad, spares, moves, busy
        self.asked, self.left_out = 0, []

    def run(self, attempt, experiment, watchdog):
        if self.node in self.bad and attempt.number < 20:  # so that endless restarts fail a test
            where = FailureLocation(0, 1, 7 + self.moves * attempt.number, "F0", 3, f"node {self.node}", "log")
            raise ProgramError(f"on node {self.node}: CUDA error", "RuntimeError", where)

    def available_devices(self, workers):
        return workers

    def leave_out(self, rank):
        self.asked += 1
        if self.node == self.spares or self.asked <= self.busy:
            return ""
        self.left_out.append((rank, self.node))
        self.node += 1
        return f"node {self.node - 1}"


@pytest.mark.parametrize(
    ("nodes", "restarts", "attempts", "left_out", "gives_up"),
    [
        ({"bad": {0}}, 10, 3, [(1, 0)], None),
        ({"bad": {0}, "spares": 0}, 10, 2, [], "the same failure"),
        ({"bad": {0, 1, 2}}, 10, 3, [(1, 0)], "the same failure"),  # the program's fault
        ({"bad": {0, 1}}, 1, 2, [], "the same failure"),
        ({"bad": {0}, "moves": True}, 6, 3, [(1, 0)], None),
        ({"bad": {0}, "moves": True, "busy": 1}, 6, 4, [(1, 0)], None),  # the others have no free device once
        ({"bad": {0}, "moves": True, "spares": 0}, 6, 7, [], "7 failures without a new checkpoint"),
        ({"bad": {0, 1, 2}, "moves": True}, 6, 7, [(1, 0)], "7 failures without a new checkpoint"),  # it is flaky
    ],
)
def test_a_node_whose_worker_fails_twice_is_left_out_while_there_are_others(
    trials, monkeypatch, nodes, restarts, attempts, left_out, gives_up
):
    monkeypatch.setattr(Watchdog, "first_step", 4)  # of each attempt: there is no newer checkpoint
    experiment, plan, attempt = trials.job(f"{STEPS} train.max_restarts={restarts}")
    devices, said = Devices(**nodes), []
    supervisor = Supervisor(experiment, plan, attempt, devices, None, said.append)
    if gives_up:
        with pytest.raises(WorkerError, match=f"Attempt {attempts} was the last: {gives_up}"):
            supervisor.run()
    else:
        supervisor.run()
        why = "the last two exceptions were on the same node; node " if devices.moves else ""
        assert any(f"{why}node 0 is left out" in line for line in said), said
    assert len(read_attempt_lines(attempt.run.attempts)) == attempts
    assert devices.left_out == left_out


def test_a_run_on_fewer_devices_is_not_planned_again_while_it_keeps_them(trials):
    experiment, plan, attempt = trials.job(f"{STEPS} train.elastic=true")
    devices = Devices({0})
    devices.available_devices = lambda workers: workers - 1
    supervisor = Supervisor(experiment, plan, attempt, devices, None, lambda line: None)  # None makes no plan
    supervisor._requested_devices = attempt.workers + 1
    supervisor.run()
    assert devices.node == 1


class EndsEarly(LocalLauncher):
    """Asks the run to end once it has done three steps, as SIGTERM does."""

    def run(self, attempt, experiment, watchdog):
        def ask():
            while (watchdog.last_step or 0) < 3:
                time.sleep(0.01)
            watchdog.ends_early.set()

        threading.Thread(target=ask, daemon=True).start()
        super().run(attempt, experiment, watchdog)


def test_a_run_that_is_asked_to_end_saves_after_its_step_and_goes_on_with_the_same_bits(trials, monkeypatch):
    settings = STEPS.replace("train.checkpoint_every=2 train.validate_every=2", "train.checkpoint_every=1000")
    experiment, plan, attempt = trials.job(settings.replace("train.steps=6", "train.steps=100000"))
    monkeypatch.setattr(interrupts, "_received", threading.Event())
    with pytest.raises(KeyboardInterrupt):
        Supervisor(experiment, plan, attempt, EndsEarly(), None, print).run()
    assert interrupts.was_interrupted()
    run, saved = attempt.run, newest(attempt.run)
    assert (saved >= 3, run.record.exists()) == (True, False)
    assert len(read_steps(run.metrics)) == saved
    (end,) = read_attempt_lines(run.attempts).values()
    assert (end["outcome"], end["reached"]) == ("interrupted", saved)
    goes_on = experiment.with_settings(f"train.steps={saved + 3}")
    Supervisor(*trials.job_of(run, goes_on, resume=True), Watched(lambda: None), None, print).run()
    undisturbed = trials.train(monkeypatch, settings.replace("train.steps=6", f"train.steps={saved + 3}"))
    assert_same(Trial(run, None, []), undisturbed)


def test_checkpoints_are_also_made_by_the_clock(trials, monkeypatch):
    saved_by_clock = "train.checkpoint_every=1000 train.checkpoint_minutes=0.000001"
    settings = STEPS.replace("train.checkpoint_every=2 train.validate_every=2", saved_by_clock)
    struck = trials.train(monkeypatch, settings, [{"fault": "kill", "stage": 1, "step": 4, "action": "B1"}])
    assert struck.error is None, struck.said
    assert struck.published[1] in (1, 2, 3, 4)  # none without the clock


def test_a_slow_replica_is_named_in_the_log_and_on_the_page_with_its_machine(trials, monkeypatch):
    settings = "train.steps=26 pipeline.stages=1 pipeline.replicas=2 pipeline.micro_batches=2"
    experiment, plan, attempt = trials.job(settings)
    monkeypatch.setenv(VARIABLE, f"{bad_node.__file__}:be_slow")
    Supervisor(experiment, plan, attempt, Watched(lambda: None), None, print).run()
    said = attempt.run.messages.read_text()
    named = re.search(r"step (\d+): replica 1, stage 0 on (\S+) computes (\S+) times as long as its peers", said)
    assert int(named[1]) == 22  # after looks at steps 10, 15 and 20, whose seconds come a step later
    assert float(named[3]) > FACTOR
    assert named[2] == socket.gethostname()
    assert "replica 0, stage 0 on" not in said
    run = RunData(attempt.run)
    ratios = [line[name] for line in run.history.steps if (name := stage_metric(1, 0, SLOW)) in line]
    assert slow_workers(run) == [f"replica 1, stage 0 on {named[2]} ({ratios[-1]:.2f} times)"]


def test_a_hook_of_workers_that_does_not_exist_is_an_error_of_the_user(trials, monkeypatch):
    monkeypatch.setenv("GPIPE_WORKER_HOOK", "nowhere.py:inject")
    with pytest.raises(SettingError, match=r"^GPIPE_WORKER_HOOK: there is no file nowhere\.py"):
        Supervisor(*trials.job(STEPS), Watched(lambda: None), None, print)
    monkeypatch.setenv("GPIPE_WORKER_HOOK", f"{injection.__file__}:injekt")
    experiment, plan, attempt = trials.job(STEPS)
    with pytest.raises(SettingError, match=r"there is no function injekt in .*injection\.py; did you mean inject"):
        Supervisor(experiment, plan, attempt, Watched(lambda: None), None, run_logger(attempt.run.messages)).run()
