"""Who holds up an attempt, decided from beats alone."""

import time
from dataclasses import replace

import pytest

from experiments.registry import find
from launch.beats import Beat, Beating, path_of, read_beat
from launch.grid import grid
from launch.watch import END_S, FIRST_BEAT_S, Judge, Watch
from launch.worker import Job
from suite.errors import WorkerError
from suite.pipeline.action import Action
from suite.pipeline.doing import FIRST_PATIENCE, Doing
from suite.pipeline.recipe import Recipe
from suite.pipeline.topology import Place

PLACES = [Place(rank, 3, 1) for rank in range(3)]
FINE = Beat(0, 0, 1, 7, "here", "", 1, 1, "F2", 17, 0, 17, None, "", 0.1, 8.0, 8.0)


def beat(stage, number, **changes):
    return replace(FINE, stage=stage, number=number, **changes)


def seen(course, seconds, every=0.5):
    """Returns the verdict on a course of beats, (second, stage) -> beat or None, and when it fell."""
    judge = Judge(PLACES)
    for look in range(int(seconds / every)):
        now = look * every
        beats = {stage: said for stage in range(3) if (said := course(now, stage)) is not None}
        verdict = judge.see(beats, every)
        if verdict is not None:
            return verdict, now
    return None, seconds


def test_workers_that_beat_and_go_on_are_left_alone():
    assert seen(lambda now, stage: beat(stage, int(now) + 1), 600)[0] is None


def test_a_silent_worker_is_named_within_ten_seconds():
    verdict, when = seen(lambda now, stage: beat(stage, int(min(now, 20) if stage == 2 else now) + 1), 100)
    assert verdict.place.stage == 2
    assert "replica 0, stage 2 on here has not answered for" in verdict.told
    assert "last seen at F2 of step 17" in verdict.told
    assert 28 <= when <= 30


def test_silence_of_all_at_once_is_rather_the_folders():
    verdict, when = seen(lambda now, stage: beat(stage, int(min(now, 20)) + 1), 100)
    assert verdict is not None  # yet it has an end as well
    assert 43 <= when <= 46


def test_a_worker_that_computes_for_too_long_is_named_before_those_that_wait_for_it():
    def course(now, stage):
        waiting = "" if stage == 1 else "the activations from stage 1"
        return beat(stage, int(now) + 1, since_s=now, waiting=waiting, layer=12 if stage == 1 else None)

    verdict, when = seen(course, 100)
    assert verdict.place.stage == 1
    assert "at F2 in layer 12 of step 17" in verdict.told
    assert 8 < when < 10


def test_those_that_wait_for_a_checkpoint_being_written_are_left_alone():
    def course(now, stage):
        if stage == 1:
            return beat(stage, int(now) + 1, what="save", since_s=now, patience_s=300.0, waiting="the checkpoint")
        return beat(stage, int(now) + 1, since_s=now, waiting="the activations from stage 1")

    verdict, when = seen(course, 400)
    assert verdict.place.stage == 1 or "all workers wait" in verdict.told
    assert when > 299


def test_a_circle_of_waits_has_an_end():
    verdict, when = seen(lambda now, stage: beat(stage, int(now) + 1, since_s=now, waiting="a message"), 100)
    assert "all workers wait for one another" in verdict.told
    assert when < 10


def test_a_worker_that_failed_or_is_done_is_not_silent():
    def course(now, stage):
        return beat(stage, 1, what=("gone", "failed")[stage]) if stage < 2 else beat(2, int(now) + 1)

    assert seen(course, 100)[0] is None


def test_the_last_one_that_works_is_named_when_it_waits_for_those_that_are_done():
    def course(now, stage):
        if stage != 2:
            return beat(stage, 1, what="gone")
        return beat(2, int(now) + 1, what="end", since_s=now, patience_s=300.0, waiting="the end of the run")

    verdict, when = seen(course, 400)
    assert verdict.place.stage == 2
    assert 300 <= when < 302


def test_processes_that_do_not_end_have_an_end():
    verdict, when = seen(lambda now, stage: beat(stage, 1, what="gone"), 100)
    assert "all workers came to their end" in verdict.told
    assert END_S <= when < END_S + 2


def test_a_wait_does_not_count_as_work_when_it_is_over():
    doing = Doing()
    doing.turn(Action("B", 2), 17)
    doing.began -= 20
    assert doing.since > 19
    with doing.waits("the gradients", 30):
        with doing.takes(40):
            assert (doing.waiting, doing.patience) == ("", FIRST_PATIENCE)
        assert doing.waiting == "the gradients"
    assert doing.since < 1
    doing.began -= 20
    doing.deadline.ended = time.monotonic()  # that of a message
    assert doing.since < 1
    with pytest.raises(KeyError), doing.waits("the gradients"):
        raise KeyError
    assert doing.waiting == "the gradients"  # others left it waiting: it is not the cause


def test_a_worker_that_never_begins_has_an_end():
    verdict, when = seen(lambda now, stage: None if stage == 0 else beat(stage, int(now) + 1), 400)
    assert "stage 0 gave no sign of life" in verdict.told
    assert FIRST_BEAT_S <= when < FIRST_BEAT_S + 2


def test_a_turn_is_in_the_file_before_the_next_beat(tmp_path):
    doing = Doing()
    with Beating(tmp_path, PLACES[1], 3, doing):
        doing.turn(Action("B", 2), 17)
        doing.turn(Action("B", 1), 17)
        last = read_beat(tmp_path, 0, 1, 3)
        assert (last.what, last.step) == ("B1", 17)
        assert read_beat(tmp_path, 0, 1, 2) is None  # another attempt's
    assert read_beat(tmp_path, 0, 1, 3).what == "gone"
    path_of(tmp_path, 0, 1).write_text("{")
    assert read_beat(tmp_path, 0, 1, 3) is None


@pytest.mark.parametrize(("what", "row"), [("B3", "F3 [B3] R2"), ("update", "[update] save"), ("end", "[end]")])
def test_the_grid_shows_where_each_stage_stands(what, row):
    beats = {0: beat(0, 1, what=what, waiting="the gradients from stage 1"), 1: beat(1, 1)}
    text = grid(Recipe(), PLACES, 4, beats, {1: "the first cause: no sign of life for 8 s"})
    first, second, third = text.splitlines()
    assert first.startswith("  stage 0  ")
    assert row in first
    assert "step 17, waits for the gradients from stage 1" in first
    assert "[F2]" in second
    assert second.endswith("the first cause: no sign of life for 8 s")
    assert third.endswith("was never heard")


def test_nobody_is_judged_while_workers_are_still_to_be_placed(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.watch.PERIOD", 0.01)
    monkeypatch.setattr("launch.watch.FIRST_BEAT_S", 0.05)
    experiment = find("t24_1_3b_wide").with_settings("pipeline.stages=2 pipeline.replicas=1")
    job = Job(tmp_path, tmp_path, (1, 1), Recipe(), False, False)
    watch = Watch(job, experiment)
    watch.held = True
    with watch:
        time.sleep(0.4)
        assert watch.verdict is None
        watch.held = False
        end = time.monotonic() + 10
        while watch.verdict is None:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "gave no sign of life" in watch.verdict.told


def test_a_file_of_beats_that_another_wrote_is_no_sign_of_life_and_harms_nobody(tmp_path):
    doing = Doing()
    with Beating(tmp_path, PLACES[1], 3, doing):
        doing.turn(Action("B", 2), 17)
        path = path_of(tmp_path, 0, 1)
        whole = path.read_bytes()
        path.write_bytes(whole + b"x")
        assert read_beat(tmp_path, 0, 1, 3).what == "B2"
        path.write_bytes(whole[:-16] + b"\xff" * 16)
        assert read_beat(tmp_path, 0, 1, 3).what == "\N{REPLACEMENT CHARACTER}" * 16
        path.write_bytes(whole.replace(b'"since_s": ', b'"since_s": "x", "x": '))
        assert read_beat(tmp_path, 0, 1, 3) is None


def until_it_ends(watch, end):
    while not watch.ends:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_watch_goes_on_after_an_exception_and_is_missed_when_it_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.watch.PERIOD", 0.01)
    monkeypatch.setattr("launch.error_log.CACHE", tmp_path / "cache")
    experiment = find("t24_1_3b_wide").with_settings("pipeline.stages=2 pipeline.replicas=1")
    watch = Watch(Job(tmp_path, tmp_path, (1, 1), Recipe(), False, False), experiment)
    failures = [ValueError("no number"), SystemExit()]

    def fail():
        raise failures.pop(0)

    watch.look = fail
    end = time.monotonic() + 10
    with watch:
        while failures:
            assert time.monotonic() < end
            time.sleep(0.01)
        watch.look = lambda: None
        with pytest.raises(WorkerError, match="the thread that watched the workers is gone"):
            until_it_ends(watch, end)
    said = (tmp_path / "messages.log").read_text()
    assert "signs of life failed (ValueError: no number); it goes on" in said
    assert "ValueError: no number" in (tmp_path / "cache/errors.log").read_text()
