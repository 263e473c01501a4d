"""A sweep of tiny members, run as by ``make sweep``: ``python -m tests.slow.small_sweep small``.

twin-0, twin-1   one experiment twice, one device each: both must have the same losses
wide             two devices; only in the sweep ``mixed``
wrong            a learning rate that is too high, a user's error; only in the sweep ``faulty``
"""

from __future__ import annotations

import sys

from experiments import names
from experiments.base.cluster import Cluster
from experiments.registry import find
from experiments.sweeps.members.base import Member
from experiments.sweeps.registry import SWEEPS
from experiments.sweeps.sweep import Sweep
from launch import cli, interrupts
from tests.slow.trial import TINY

STEPS = 1000
"""Enough that one twin still runs when the other, which may start seconds later, has saved."""
SETTINGS = f"pipeline.stages=1 train.steps={STEPS} train.checkpoint_every=10"


def member(name, settings="", priority=0):
    run = find("t24_1_3b_wide").at_laptop_scale(Cluster(2, 2**33, "cpu"))
    for part in (TINY, SETTINGS, settings):
        run = run.with_settings(part)
    return Member(f"small/{name}", name, run, priority=priority)


def small(name, *more):
    """Returns a sweep of the twins and other members."""
    members = [member("twin-0", priority=1), member("twin-1", priority=1), *more]
    return Sweep(name, "Small", lambda *where: members, lambda *found: ([], []))


def add_sweeps():
    for sweep in (
        small("small"),
        small("faulty", member("wrong", "optimizer.learning_rate=1e30 optimizer.warmup_steps=1 train.steps=60")),
        small("mixed", member("wide", "pipeline.stages=2 train.steps=12", priority=2)),
    ):
        SWEEPS[sweep.name] = sweep
        names.SWEEP_NAMES = (*names.SWEEP_NAMES, sweep.name)


if __name__ == "__main__":
    add_sweeps()
    interrupts.install()
    sys.argv = ["gpipe", "sweep", sys.argv[1], "--launcher", "ray"]
    cli.main()
