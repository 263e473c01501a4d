"""A run's folder on nodes that do not share it: carried there before an attempt, and back while it runs.

driver's node    runs/<name>/<id>/   experiment.toml  metrics.jsonl  beats/  logs/ ...
                     |  all of it, once            ^  what changes there, twice a second
node b           the same path, its own disk ------+      (checkpoints go to a URL, never through here)

Nothing of the training goes this way. Where all nodes share the folder, nothing is carried.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from launch.cluster.parcels import Changes, Piece, packed, put, unpack
from suite.errors import PlacementError, WorkerError
from suite.pipeline.placement import Node

PERIOD = 0.5

ANSWER_S = 60.0
"""Seconds in which a node takes the run's files; a process of Ray starts for it."""

SLOWEST = 1e7
"""Bytes a second at which prepared data is given time to arrive."""

LAST_S = 10.0
"""Seconds for what changed last, at an attempt's end; a node that is gone does not answer."""


class Outpost:
    """Runs on a node, beside the workers: an actor of Ray."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._changes: Changes | None = None

    def sees(self, marker: str) -> bool:
        """Whether a file that the driver's node has is here too."""
        return Path(marker).exists()

    def receive(self, run: bytes) -> None:
        """Takes the run's folder as it is now."""
        for passing in ("experiment.draft", "shrunk.toml"):  # of an attempt before this one
            (self._folder / passing).unlink(missing_ok=True)
        unpack(run, self._folder)
        self._changes = Changes(self._folder)

    def keep(self, folder: str, data: bytes) -> None:
        """Takes prepared data, whole or not at all."""
        keep(Path(folder), data)

    def changes(self) -> list[Piece]:
        """Returns what changed since the last time."""
        return list(self._changes.take()) if self._changes is not None else []


def keep(folder: Path, data: bytes) -> None:
    """Lays packed files out as a new folder, whole or not at all; one that is there stays."""
    if folder.exists():
        return
    draft = folder.with_name(f"{folder.name}.draft-{uuid4().hex}")
    unpack(data, draft)
    try:
        draft.rename(folder)
    except OSError:  # another worker's came first
        shutil.rmtree(draft, ignore_errors=True)


class Mirror:
    """A context in which a run's folder on other nodes is carried to this one."""

    def __init__(self, run: Path, data: Path, nodes: Sequence[Node], at_url: bool, say: Callable[[str], None]) -> None:
        """``nodes`` are those of the workers; ``at_url`` says whether checkpoints go where all nodes can reach them."""
        self._run, self._data, self._nodes, self._at_url, self._say = run, data, nodes, at_url, say
        self._posts: dict[Any, Node] = {}
        self._hurry = self._told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="mirror")

    def __enter__(self) -> Mirror:
        """Raises PlacementError when a node does not share the folder and checkpoints would lie in it."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        others = {node.id: node for node in self._nodes if node.id != own}
        posts = {_post(node, self._run): node for node in others.values()}
        apart = self._apart(posts)
        if apart:
            names = ", ".join(node.name for node in apart.values())
            if not self._at_url:
                raise PlacementError(
                    f"{len(apart)} nodes do not see the run's folder {self._run}: {names}; put it where all nodes "
                    'share it (GPIPE_STORAGE), or SET="train.checkpoints=s3://..." and it is carried to them'
                )
            self._say(f"{names}: the run's folder is not shared, its files are carried; checkpoints go to their URL")
            self._send(apart)
            self._posts = apart
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self, at_once: bool = False) -> None:
        """Ends the carrying, with what changed last unless ``at_once``. Ray must still be connected."""
        self._hurry = self._hurry or at_once
        self._stop.set()
        if self._posts:
            self._thread.join(2 * LAST_S)

    def _apart(self, posts: dict[Any, Node]) -> dict[Any, Node]:
        """Returns the nodes that do not share the run's folder."""
        marker = self._run / f".seen-{uuid4().hex}"
        marker.touch()
        try:
            seen = _all({post: post.sees.remote(str(marker)) for post in posts}, posts)
        finally:
            marker.unlink()
        return {post: node for post, node in posts.items() if not seen[post]}

    def _send(self, posts: dict[Any, Node]) -> None:
        """Sends what workers read: the run's folder, and the prepared data where a node has none."""
        import ray

        has = _all({post: post.sees.remote(str(self._data)) for post in posts}, posts)
        lacking = [post for post in posts if not has[post]]
        if lacking:
            data = packed(self._data)
            sent = ray.put(data)
            patience = ANSWER_S + len(lacking) * len(data) / SLOWEST
            _all({post: post.keep.remote(str(self._data), sent) for post in lacking}, posts, patience)
        run = ray.put(packed(self._run))
        _all({post: post.receive.remote(run) for post in posts}, posts)

    def _follow(self) -> None:
        import ray

        asked = {post.changes.remote(): post for post in self._posts}
        while not self._stop.wait(PERIOD):
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PERIOD)
            for result in ready:
                post = asked.pop(result)
                if self._take(result):
                    asked[post.changes.remote()] = post
        if self._hurry:
            return
        last = [*asked, *(post.changes.remote() for post in asked.values())]
        ready, _ = ray.wait(last, num_returns=len(last), timeout=LAST_S) if last else ([], [])
        for result in last:
            if result in ready:
                self._take(result)

    def _take(self, result: Any) -> bool:
        """Writes what a node sent; returns whether it is there still."""
        import ray
        from ray.exceptions import RayError

        try:
            pieces: list[Piece] = ray.get(result, timeout=LAST_S)
        except (RayError, TimeoutError):
            return False
        for piece in pieces:
            try:
                put(self._run, piece)
            except OSError as error:  # a full disk: what a run writes itself waits as well, and the run goes on
                if not self._told:
                    self._say(f"what workers of other nodes write cannot be kept: {error}; make room")
                self._told = True
            if piece.path == "experiment.toml":  # its worker has made it of the draft
                (self._run / "experiment.draft").unlink(missing_ok=True)
        return True


def _post(node: Node, folder: Path) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(Outpost).options(num_cpus=0, scheduling_strategy=where).remote(str(folder))


def _all(asked: dict[Any, Any], posts: dict[Any, Node], patience_s: float = ANSWER_S) -> dict[Any, Any]:
    """Returns what each node answers. Raises WorkerError for the first that does not: another attempt may be placed on
    others."""
    import ray
    from ray.exceptions import RayError

    found = {}
    for post, result in asked.items():
        try:
            found[post] = ray.get(result, timeout=patience_s)
        except (RayError, TimeoutError) as error:
            raise WorkerError(
                f"node {posts[post].name} could not take the run's files: {str(error).splitlines()[0]}; see `make "
                "doctor`, or remove it"
            ) from None
    return found
