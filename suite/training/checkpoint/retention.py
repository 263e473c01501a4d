"""Which checkpoints are kept: the newest two, and always the last good one and the best one.

step     10     20     30     40     50        good: a finite step followed it. Here every step after 20 was skipped:
         good   good   .      .      .         50 and 40 are the newest, 20 is kept in addition
                kept          kept   kept

best: no validation before was better. Only the last of these is kept beyond the newest two.

A run that continues from step 20 abandons 30 to 50. Nothing uses them unless asked for by step, and they are removed
once the next checkpoint is published.
"""

from __future__ import annotations

from collections.abc import Collection

from suite.training.checkpoint.storage import MANIFEST, Storage

KEEP_LATEST = 2
"""The newest one, and one to fall back to."""

KEEP_GOOD, KEEP_BEST, ABANDONED = "good", "best", "abandoned"
"""Marks: empty files in a checkpoint's folder."""


def steps_to_keep(finished: Collection[int], good: Collection[int], best: Collection[int] = ()) -> set[int]:
    """Returns the steps to keep of the ``finished`` checkpoints, of which some are ``good`` and some were the ``best``
    when they were saved."""
    last = (sorted(set(marked) & set(finished))[-1:] for marked in (good, best))
    return {*sorted(finished)[-KEEP_LATEST:], *(step for steps in last for step in steps)}


def rotate(storage: Storage, step: int, stale: Collection[str] = ()) -> None:
    """Removes old checkpoints after the one of ``step`` is published.

    Also removes abandoned and unfinished ones, and the ``stale`` folders, wherever they are: those that the run found
    beyond the step at which it was resumed, and could not use. Others beyond ``step`` stay: another driver has
    published them. A plain file that is named like a checkpoint is not ours and stays.
    """
    folders = {int(name): name for name in storage.folders() if storage.is_folder(name)}
    names = {at: storage.names(name) for at, name in folders.items()}
    finished = {at for at in folders if MANIFEST in names[at] and ABANDONED not in names[at]} - set(map(int, stale))
    ours = {at for at in finished if at <= step} | {step}  # also where a listing does not show it yet
    good, best = ([at for at in ours & finished if mark in names[at]] for mark in (KEEP_GOOD, KEEP_BEST))
    kept = steps_to_keep(ours, good, best) | (finished - ours)
    for at, name in folders.items():
        if at not in kept:
            storage.remove_folder(name)


def abandon_later(storage: Storage, step: int) -> None:
    """Marks the checkpoints after ``step`` as abandoned, and no others: the run continues there. If it is interrupted,
    the newest checkpoint that is not abandoned is the one before, or that of ``step``, and none between."""
    folders = [name for name in storage.folders() if storage.is_folder(name)]
    for name in reversed(folders):  # the newest last
        if int(name) > step:
            mark(storage, name, ABANDONED)
    for name in folders:  # the newest first
        if int(name) <= step and ABANDONED in storage.names(name):
            storage.remove(f"{name}/{ABANDONED}")
            storage.settle(name)


def mark(storage: Storage, folder: str, name: str) -> None:
    """Writes a mark. In a power cut it must not be lost after something was removed because of it."""
    storage.write(f"{folder}/{name}", b"")
    storage.settle(folder)
