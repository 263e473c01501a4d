"""The life of a run on a disk whose power is cut at any change: what was not synced is lost, or only a part of it.

Afterwards the next resume must find the checkpoint that was published last.
"""

import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from suite.errors import CheckpointError
from suite.training.checkpoint import Storage
from tests.suite.training.checkpoint.saves import newest_of, step_of
from tests.suite.training.checkpoint.storage_model import Crash, Life, ready

LEFT = ("nothing", "writes", "removals", "all")
"""What a power cut leaves of the changes that were not synced."""


class Disk:
    """Two folders: what the processes see, and what a power cut leaves."""

    def __init__(self, seen, kept, cut_at=None, left="nothing"):
        self.seen, self.kept, self._cut_at, self._left = seen, kept, cut_at, left
        self.count, self.crashed, self._changes = 0, False, []
        kept.mkdir()

    def next(self):
        """Counts a call. Raises if the power is cut before it."""
        self.count += 1
        if self.crashed or self.count == self._cut_at:
            if not self.crashed:
                chosen = {"nothing": (), "writes": ("write",), "removals": ("remove",), "all": ("write", "remove")}
                for kind, path in self._changes:
                    if kind in chosen[self._left]:
                        self._keep(kind, path)
            self.crashed = True
            raise Crash

    def change(self, kind, path):
        """Notes a change that is seen now and not synced."""
        self._changes.append((kind, path))

    def sync(self, folder):
        """Keeps the changes of a folder's entries, and of the root's."""
        for kind, path in self._changes:
            if path.rpartition("/")[0] in (folder, ""):
                self._keep(kind, path)
        self._changes = [change for change in self._changes if change[1].rpartition("/")[0] not in (folder, "")]

    def _keep(self, kind, path):
        at = self.kept / path
        if kind == "remove":
            shutil.rmtree(at) if at.is_dir() else at.unlink(missing_ok=True)
        elif (self.seen / path).exists():
            at.parent.mkdir(exist_ok=True)
            at.write_bytes((self.seen / path).read_bytes())


class DiskStorage(Storage):
    """A place on a disk whose power is cut. The content of a file is synced when it is written, its name is not."""

    def __init__(self, disk, location):
        super().__init__(location)
        self._disk, files = disk, self._files
        self._files = SimpleNamespace(**{name: getattr(files, name) for name in ("ls", "info", "cat_file")})
        self._files.rm_file = partial(self._removed, files.rm_file)
        self._files.rm = partial(self._removed, files.rm)

    def _removed(self, remove, path, **options):
        self._disk.next()
        remove(path, **options)
        self._disk.change("remove", path.removeprefix(self._root).lstrip("/"))

    def write(self, path, data):
        self._disk.next()
        super().write(path, data)
        self._disk.change("write", path)

    def settle(self, folder):
        self._disk.next()
        self._disk.sync(folder)


def cut(worker, folder, cut_at=None, left="nothing"):
    """Returns how many calls a life on a disk made until the power was cut. Raises AssertionError if the disk then has
    another newest checkpoint than the one published last, or the one that was being published."""
    folder.mkdir()
    (folder / "run").mkdir()
    (folder / "seen").mkdir()
    disk = Disk(folder / "seen", folder / "kept", cut_at, left)
    life = Life(worker, str(disk.seen), disk, folder / "run", DiskStorage)
    with suppress(Crash, CheckpointError):
        life.live()
    location = str(disk.kept if disk.crashed else disk.seen)
    step, allowed = step_of(newest_of(location)), {life.published[-1] if life.published else 0, life.saving}
    if life.left is not None and len(life.published) == 1:
        allowed |= {life.left}  # the fork is not decided before its first checkpoint
    assert step in allowed, f"call {cut_at} {left}: step {step}, and not one of {allowed}"
    shutil.rmtree(folder)
    return disk.count


def cut_everywhere(rank, world, rendezvous, every):
    """Cuts the power at each ``every``-th call, and leaves each part of what was not synced. Returns the calls."""
    worker = ready(rank, world, rendezvous)
    with tempfile.TemporaryDirectory() as folder:
        total = cut(worker, Path(folder) / "undisturbed")
        for left in LEFT:
            for cut_at in range(1, total + 1, every):
                cut(worker, Path(folder) / f"{left}-{cut_at}", cut_at, left)
    return total
