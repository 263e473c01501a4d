"""Mirrors a run's folder on nodes that do not share it: copied there before an attempt, and back while it runs.

driver's node    runs/<name>/<id>/   experiment.toml  metrics.jsonl  logs/ ...
                     |  everything, once            ^  changes, twice a second
node b           the same path, its own disk -------+      (checkpoints go to a URL, never this way)

Tensors are never copied this way. If all nodes share the folder, nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from experiments.base.hints import command, option
from launch import node_probe
from launch.ray_nodes import collect, own_node, reason, start_on
from launch.storage_sync.data_transfer import receiver_on, send_folder
from launch.storage_sync.folder_delta import MARKER, FileDelta, FolderDelta, apply_delta
from launch.worker.attempt import TEMPORARY, draft_of
from suite.errors import PathError, PlacementError, WorkerError
from suite.pipeline.planning.placement import Node

PERIOD = 0.5

ANSWER_S = 60.0
"""Seconds for a node to receive the run's files; includes the start of a Ray process."""

LAST_S = 10.0
"""Seconds for the last changes at an attempt's end; a lost node does not answer."""


class MirrorActor:
    """A Ray actor on a worker's node."""

    def __init__(self, folder: str, mark: str) -> None:
        """``mark`` is the content of the marker file that the driver writes into folders that may be shared."""
        self._folder, self._mark = Path(folder), mark
        self._changes: FolderDelta | None = None

    def shares(self, folder: str, timeout_s: float = 0.0) -> bool:
        """Whether the folder has the driver's marker; checks until ``timeout_s``."""
        return not node_probe.unseen_markers(folder, [MARKER], timeout_s, self._mark)

    def receive(self, run: list[FileDelta]) -> None:
        """Writes the run's files, unless the folder turns out to be shared."""
        if self.shares(str(self._folder)):
            return
        for name in TEMPORARY:  # left from an earlier attempt
            (self._folder / name).unlink(missing_ok=True)
        for delta in run:
            apply_delta(self._folder, delta)
        self._changes = FolderDelta(self._folder)

    def changes(self) -> list[FileDelta] | None:
        """Returns the changes since the last call; None if the folder turns out to be shared. Then the driver has all
        files, and would receive its own appended lines again and again."""
        if self.shares(str(self._folder)):
            return None
        return list(self._changes.take()) if self._changes is not None else []


class FolderMirror:
    """Copies changes of a run's folder from other nodes to this one, in a thread."""

    def __init__(
        self, run: Path, data: Path, nodes: Sequence[Node], checkpoints: str, unshared: set[str],
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``nodes`` are the workers' nodes, ``checkpoints`` is the folder or URL of the run's checkpoints. ``unshared``
        are the ids of nodes known not to share the run's folder; newly found ones are added."""
        self._run, self._data, self._nodes, self._checkpoints, self._log = run, data, nodes, checkpoints, log
        self._known_unshared, self._mark = unshared, uuid4().hex
        self._actors: dict[Any, Node] = {}
        self._skip_last_copy = self._logged_write_error = False
        self._lost: set[str] = set()
        """Ids of nodes whose files are no longer copied."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy_changes, daemon=True, name="mirror")

    def start(self) -> None:
        """Starts to copy. Raises PlacementError when a node shares neither the run's folder nor the checkpoints."""
        others = {node.id: node for node in self._nodes if node.id != own_node()}
        actors = {start_on(node.id, MirrorActor, str(self._run), self._mark): node for node in others.values()}
        unshared = self._find_unshared(actors, self._run, self._known_unshared)
        self._known_unshared.update(node.id for node in unshared.values())
        if unshared:
            names = ", ".join(node.name for node in unshared.values())
            if checkpoints := node_probe.folder_of(self._checkpoints):
                without_checkpoints = self._find_unshared(unshared, Path(checkpoints), set())
                if without_checkpoints:
                    raise PlacementError(
                        f"{len(unshared)} nodes do not share the run's folder {self._run}: {names}; "
                        f"{len(without_checkpoints)} of them do not share its checkpoints in {self._checkpoints} "
                        "either; put the run on storage that all nodes share (GPIPE_STORAGE), or set "
                        f"{option('SET', 'train.checkpoint_dir=s3://...')}; then the other files are copied"
                    )
            self._log(
                f"{names}: the run's folder is not shared, its files are copied; checkpoints go to {self._checkpoints}"
            )
            self._send(unshared)
            self._actors = unshared
            self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether the files of all unshared nodes are still copied. A node that turned out to share the folder counts,
        because its files are already here."""
        return not self._lost

    def end(self, skip_last_copy: bool = False) -> None:
        """Stops copying, after the last changes unless ``skip_last_copy``. Ray must still be connected."""
        self._skip_last_copy = self._skip_last_copy or skip_last_copy
        self._stop.set()
        if self._actors:
            self._thread.join(2 * LAST_S)
        (self._run / MARKER).unlink(missing_ok=True)

    def _find_unshared(self, actors: dict[Any, Node], folder: Path, known: set[str]) -> dict[Any, Node]:
        """Returns the nodes that do not share a folder: those that do not see a marker file in it. Does not wait for
        nodes in ``known``."""
        if not actors:
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(self._mark)
        timeout_s = {actor: 0.0 if node.id in known else node_probe.SETTLE_S for actor, node in actors.items()}
        try:
            calls = {actor: actor.shares.remote(str(folder), timeout_s[actor]) for actor in actors}
            shares = _collect_all(calls, actors)
        finally:
            if folder != self._run:  # the marker in the run's folder stays while files are copied
                (folder / MARKER).unlink()
        return {actor: node for actor, node in actors.items() if not shares[actor]}

    def _send(self, actors: dict[Any, Node]) -> None:
        """Sends the run's folder, and the prepared data to nodes that do not have it."""
        import ray

        send_folder(self._data, {receiver_on(node, self._data): node for node in actors.values()})
        run = ray.put(list(FolderDelta(self._run, from_now=False).take()))
        _collect_all({actor: actor.receive.remote(run) for actor in actors}, actors)

    def _copy_changes(self) -> None:
        actors = dict(self._actors)
        try:
            self._copy_until_stopped(actors)
        except Exception as error:  # of many types: raised by Ray
            for node in actors.values():
                self._lose(node, reason(error))

    def _copy_until_stopped(self, actors: dict[Any, Node]) -> None:
        """Copies files until the end. Removes nodes from ``actors`` when their files are no longer copied."""
        import ray

        pending = {actor.changes.remote(): actor for actor in actors}
        while pending and not self._stop.wait(PERIOD):
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=PERIOD)
            for result in ready:
                actor = pending.pop(result)
                if self._apply(result, actors[actor]):
                    pending[actor.changes.remote()] = actor
                else:
                    del actors[actor]
        if self._skip_last_copy:
            return
        last = pending | {actor.changes.remote(): actor for actor in pending.values()}
        ready, _ = ray.wait(list(last), num_returns=len(last), timeout=LAST_S) if last else ([], [])
        for result, actor in last.items():
            if result in ready and actors[actor].id not in self._lost:
                self._apply(result, actors[actor])

    def _apply(self, result: Any, node: Node) -> bool:
        """Applies a node's changes; returns whether to continue with this node."""
        import ray

        try:
            deltas: list[FileDelta] | None = ray.get(result, timeout=LAST_S)
        except Exception as error:  # of many types: the node is lost, its call failed, or the result is unreadable
            self._lose(node, reason(error))
            return False
        if deltas is None:
            self._log(f"{node.name} shares the run's folder after all: its files are no longer copied")
            return False
        for delta in deltas:
            try:
                apply_delta(self._run, delta)
            except OSError as error:  # such as a full disk; the run continues
                if not self._logged_write_error:
                    self._log(f"files from other nodes cannot be written: {error}; free space")
                self._logged_write_error = True
            except PathError as error:
                self._lose(node, f"it sent a file that it must not write: {error}")
                return False
            if delta.path in ("experiment.toml", "plan.json"):  # its worker has renamed the draft
                draft_of(self._run / delta.path).unlink(missing_ok=True)
        return True

    def _lose(self, node: Node, why: str) -> None:
        """Records that a node's files are no longer copied. Logs the reason once, except when the session closes."""
        if node.id in self._lost:
            return
        self._lost.add(node.id)
        if not self._skip_last_copy:
            self._log(f"{node.name}: its files are no longer copied to the run's folder: {why}")


def _collect_all(calls: dict[Any, Any], nodes: dict[Any, Node]) -> dict[Any, Any]:
    """Returns the result of each actor's call. Raises WorkerError, because the next attempt may use other nodes, for
    one that fails."""
    answers, failures = collect(calls, ANSWER_S)
    for actor, why in failures.items():
        raise WorkerError(
            f"node {nodes[actor].name} could not receive the run's files: {why}; run "
            f"`{command('doctor')}`, or remove the node"
        )
    return answers
