"""Which checkpoints stay: the newest two, and always the last good one.

step     10     20     30     40     50        good: a finite step was done from it. Here every step after 20 was
         good   good   .      .      .         skipped: 50 and 40 are the newest, 20 is kept beside them
                kept          kept   kept
"""

from __future__ import annotations

from collections.abc import Collection

from suite.training.checkpoint.storage import MANIFEST, Storage

KEEP = 2
"""The newest, and one to fall back to."""

GOOD = "good"


def kept(finished: Collection[int], good: Collection[int]) -> set[int]:
    """Returns the steps of those that stay, of the ``finished`` and, among them, the ``good``."""
    return {*sorted(finished)[-KEEP:], *sorted(set(good) & set(finished))[-1:]}


def rotate(storage: Storage, step: int) -> None:
    """Removes what need not stay once the checkpoint of ``step`` is there.

    What lies beyond ``step`` is of a future that a resume gave up, and what has no manifest was never finished. A file
    that is named like a checkpoint is not ours and stays.
    """
    folders = {int(name): name for name in storage.folders() if storage.is_folder(name)}
    names = {at: storage.names(name) for at, name in folders.items()}
    finished = [at for at in folders if at <= step and MANIFEST in names[at]]
    stay = kept(finished, [at for at in finished if GOOD in names[at]])
    for at, name in folders.items():
        if at not in stay:
            storage.remove_folder(name)


def mark_good(storage: Storage, folder: str) -> None:
    """Notes that a finite step was done from a checkpoint."""
    storage.write(f"{folder}/{GOOD}", b"")
