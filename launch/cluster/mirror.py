"""A run's folder on nodes that do not share it: carried there before an attempt, and back while it runs.

driver's node    runs/<name>/<id>/   experiment.toml  metrics.jsonl  beats/  logs/ ...
                     |  all of it, once            ^  what changes there, twice a second
node b           the same path, its own disk ------+      (checkpoints go to a URL, never through here)

Nothing of the training goes this way. Where all nodes share the folder, nothing is carried.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from launch.cluster.causes import first_line
from launch.cluster.data_transfer import receiver_on, send_folder
from launch.cluster.parcels import MARKER, Changes, Piece, packed, put, unpack
from launch.doctor.markers import SETTLE_S, is_local
from suite.errors import PathError, PlacementError, WorkerError
from suite.pipeline.placement import Node

PERIOD = 0.5

ANSWER_S = 60.0
"""Seconds in which a node takes the run's files; a process of Ray starts for it."""

LAST_S = 10.0
"""Seconds for what changed last, at an attempt's end; a node that is gone does not answer."""


class Outpost:
    """Runs on a node, beside the workers: an actor of Ray."""

    def __init__(self, folder: str, mark: str) -> None:
        """``mark`` is what the driver's node has written into the marker of each folder that may be shared."""
        self._folder, self._mark = Path(folder), mark
        self._changes: Changes | None = None

    def shares(self, folder: str, patience_s: float) -> bool:
        """Whether a folder is the one in which the driver's node has set a marker. A network file system may show it
        late, so it is looked for until ``patience_s`` have passed."""
        until = time.monotonic() + patience_s
        while not (found := self._marked(Path(folder))) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def _marked(self, folder: Path) -> bool:
        try:
            return (folder / MARKER).read_text() == self._mark
        except OSError:
            return False

    def receive(self, run: bytes) -> None:
        """Takes the run's folder as it is now, unless this is the same one."""
        if self._marked(self._folder):
            return
        for passing in ("experiment.draft", "shrunk.toml"):  # of an attempt before this one
            (self._folder / passing).unlink(missing_ok=True)
        unpack(run, self._folder)
        self._changes = Changes(self._folder)

    def changes(self) -> list[Piece] | None:
        """Returns what changed since the last time; None where the folder turns out to be shared: the driver's node has
        all of it, and what it added to its own files would come back to it for ever."""
        if self._marked(self._folder):
            return None
        return list(self._changes.take()) if self._changes is not None else []


class Mirror:
    """A context in which a run's folder on other nodes is carried to this one."""

    def __init__(
        self, run: Path, data: Path, nodes: Sequence[Node], checkpoints: str, apart: set[str],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``nodes`` are those of the workers, ``checkpoints`` is the folder or URL of the run's. ``apart`` are the ids
        of nodes that were found not to share the run's folder; those found now are added."""
        self._run, self._data, self._nodes, self._checkpoints, self._say = run, data, nodes, checkpoints, say
        self._known_apart, self._mark = apart, uuid4().hex
        self._posts: dict[Any, Node] = {}
        self._hurry = self._told = False
        self._lost: set[str] = set()
        """The ids of nodes apart whose files are no longer carried."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="mirror")

    def __enter__(self) -> Mirror:
        """Raises PlacementError when a node shares neither the folder nor the checkpoints' place."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        others = {node.id: node for node in self._nodes if node.id != own}
        posts = {_post(node, self._run, self._mark): node for node in others.values()}
        apart = self._apart(posts, self._run, self._known_apart)
        self._known_apart.update(node.id for node in apart.values())
        if apart:
            names = ", ".join(node.name for node in apart.values())
            if is_local(self._checkpoints) and (lacking := self._apart(apart, _folder_of(self._checkpoints), set())):
                raise PlacementError(
                    f"{len(apart)} nodes do not see the run's folder {self._run}: {names}; of these {len(lacking)} do "
                    f"not see its checkpoints in {self._checkpoints} either; put the run where all nodes share it "
                    '(GPIPE_STORAGE), or SET="train.checkpoints=s3://..." and it is carried to them'
                )
            self._say(
                f"{names}: the run's folder is not shared, its files are carried; checkpoints go to {self._checkpoints}"
            )
            self._send(apart)
            self._posts = apart
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def whole(self) -> bool:
        """Whether the files of all nodes apart are still carried. A node that turns out to share the folder counts: its
        files are here without that."""
        return not self._lost

    def end(self, at_once: bool = False) -> None:
        """Ends the carrying, with what changed last unless ``at_once``. Ray must still be connected."""
        self._hurry = self._hurry or at_once
        self._stop.set()
        if self._posts:
            self._thread.join(2 * LAST_S)
        (self._run / MARKER).unlink(missing_ok=True)

    def _apart(self, posts: dict[Any, Node], folder: Path, known: set[str]) -> dict[Any, Node]:
        """Returns the nodes that do not share a folder, by a marker that is set there; of the ``known`` ones that is
        known, and they are not waited for."""
        if not posts:
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(self._mark)
        patience = {post: 0.0 if node.id in known else SETTLE_S for post, node in posts.items()}
        try:
            shares = _all({post: post.shares.remote(str(folder), patience[post]) for post in posts}, posts)
        finally:
            if folder != self._run:  # there it stays while the run's files are carried
                (folder / MARKER).unlink()
        return {post: node for post, node in posts.items() if not shares[post]}

    def _send(self, posts: dict[Any, Node]) -> None:
        """Sends what workers read: the run's folder, and the prepared data where a node has none."""
        import ray

        send_folder(self._data, {receiver_on(node, self._data): node for node in posts.values()})
        run = ray.put(packed(self._run))
        _all({post: post.receive.remote(run) for post in posts}, posts)

    def _follow(self) -> None:
        carried = dict(self._posts)
        try:
            self._carry(carried)
        except Exception as error:  # of many types: Ray's own, or what its threads raise
            for node in carried.values():
                self._lose(node, first_line(error))

    def _carry(self, carried: dict[Any, Node]) -> None:
        """Carries files until the end. Nodes whose files are no longer carried are taken out of ``carried``."""
        import ray

        asked = {post.changes.remote(): post for post in carried}
        while asked and not self._stop.wait(PERIOD):
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PERIOD)
            for result in ready:
                post = asked.pop(result)
                if self._take(result, carried[post]):
                    asked[post.changes.remote()] = post
                else:
                    del carried[post]
        if self._hurry:
            return
        last = asked | {post.changes.remote(): post for post in asked.values()}
        ready, _ = ray.wait(list(last), num_returns=len(last), timeout=LAST_S) if last else ([], [])
        for result, post in last.items():
            if result in ready and carried[post].id not in self._lost:
                self._take(result, carried[post])

    def _take(self, result: Any, node: Node) -> bool:
        """Writes what a node sent; returns whether it is to be asked again."""
        import ray

        try:
            pieces: list[Piece] | None = ray.get(result, timeout=LAST_S)
        except Exception as error:  # of many types: the node is gone, it raised something, the answer cannot be read
            self._lose(node, first_line(getattr(error, "cause", None) or error))
            return False
        if pieces is None:
            self._say(f"{node.name} shares the run's folder after all: its files are no longer carried")
            return False
        for piece in pieces:
            try:
                put(self._run, piece)
            except OSError as error:  # a full disk: what a run writes itself waits as well, and the run goes on
                if not self._told:
                    self._say(f"what workers of other nodes write cannot be kept: {error}; make room")
                self._told = True
            except PathError as error:
                self._lose(node, f"it sent a file that it must not write: {error}")
                return False
            if piece.path == "experiment.toml":  # its worker has made it of the draft
                (self._run / "experiment.draft").unlink(missing_ok=True)
        return True

    def _lose(self, node: Node, why: str) -> None:
        """Says once why a node's files are no longer carried; not at a session's end, which ends that of all."""
        if node.id in self._lost:
            return
        self._lost.add(node.id)
        if not self._hurry:
            self._say(f"{node.name}: its files are no longer carried to the run's folder: {why}")


def _folder_of(location: str) -> Path:
    """Returns the folder of a location that is one, given as a path or as file://."""
    return Path(location.split("://")[-1])


def _post(node: Node, folder: Path, mark: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(Outpost).options(num_cpus=0, scheduling_strategy=where).remote(str(folder), mark)


def _all(asked: dict[Any, Any], posts: dict[Any, Node]) -> dict[Any, Any]:
    """Returns what each node answers. Raises WorkerError for the first that does not: another attempt may be placed on
    others."""
    import ray
    from ray.exceptions import RayError

    found = {}
    for post, result in asked.items():
        try:
            found[post] = ray.get(result, timeout=ANSWER_S)
        except (RayError, TimeoutError) as error:
            raise WorkerError(
                f"node {posts[post].name} could not take the run's files: {first_line(error)}; see `make "
                "doctor`, or remove it"
            ) from None
    return found
