"""Who writes a run's checkpoints: the driver that came last. One that has lost them writes and removes nothing.

    driver A   claim ---- save 10 ---- save 20 ------------- save 30: refused, B has claimed them
    driver B                                    claim ---- save 25 ----

A lock in the run's folder keeps two drivers apart where both see that folder. The checkpoints may be at a URL, or the
folder a copy, so the record is beside them. Two drivers that look in the same moment can both go on once.
"""

from __future__ import annotations

import json

from suite.training.checkpoint.storage import Storage

OWNER = "owner.json"


def claim(storage: Storage, owner: str) -> None:
    """Makes ``owner``, a text that no other driver has, the owner. Raises OSError if that cannot be written."""
    storage.write(OWNER, json.dumps({"owner": owner}).encode())


def check_owner(storage: Storage, owner: str) -> None:
    """Raises OSError when another driver has claimed the checkpoints since, or the record of the owner is gone."""
    try:
        found = json.loads(storage.read(OWNER, storage.size(OWNER)))["owner"]
    except FileNotFoundError:
        raise OSError(
            f"{storage.shown(OWNER)} is missing: the folder was moved, or its disk is not mounted; nothing is written"
        ) from None
    except (ValueError, TypeError, KeyError):
        found = "an unreadable record"
    if found != owner:
        raise OSError(
            f"{storage.shown('')} belongs to another driver of this run ({found}, not {owner}); nothing is written; "
            "end one of the two"
        )
