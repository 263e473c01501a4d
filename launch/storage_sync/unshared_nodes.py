"""Prepares nodes that do not share the run's folder: they get a copy, and changes in it come back.

driver's node    runs/<name>/<id>/   experiment.toml  metrics.jsonl  logs/ ...
                     |  everything, before the first attempt   ^  changes, twice a second
node b           the same path, its own disk   ----------------+  the first agent of the node calls the dispatcher

The driver finds such nodes by a marker file, and sends them the run's files and the prepared data by Ray tasks. After
that the agents, which send heartbeats to the dispatcher anyway, send it new lines and files too, and the dispatcher
writes them into the run's folder. Checkpoints and tensors never go this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.base.hints import option
from launch import node_probe
from launch.ray_nodes import own_node, run_on_all
from launch.storage_sync.data_transfer import not_received, send_folder
from launch.storage_sync.folder_delta import MARKER, FileDelta, FolderDelta, apply_delta
from launch.worker.attempt import TEMPORARY, Attempt
from suite.errors import PlacementError
from suite.log import Log
from suite.pipeline.planning.placement import Node

ANSWER_S = 60.0
"""Seconds for a node to look for a marker, or to receive the run's files; includes the start of a Ray process."""

RUN_NOT_RECEIVED = not_received("the run's files")


def prepare_nodes(
    attempt: Attempt, nodes: Sequence[Node], checkpoints: str, unshared: set[str], log: Log
) -> dict[str, FolderDelta]:
    """Gives the nodes that do not share the run's folder its files and the prepared data. Returns the folder on each of
    them, by node id, to take later changes from.

    ``nodes`` are the workers' nodes, ``checkpoints`` is the folder or URL of the run's checkpoints. ``unshared`` are
    the ids of nodes known not to share the run's folder; newly found ones are added. Raises PlacementError when a node
    shares neither the run's folder nor the checkpoints, WorkerError when one does not answer.
    """
    import ray

    others = list({node.id: node for node in nodes if node.id != own_node()}.values())
    if not others:
        return {}
    new = [node for node in others if node.id not in unshared]
    unshared.update(node.id for node in _not_sharing(new, attempt.folder, attempt.owner))
    receivers = [node for node in others if node.id in unshared]
    if not receivers:
        return {}
    names = ", ".join(node.name for node in receivers)
    if path := node_probe.folder_of(checkpoints):
        folder = Path(path)
        try:
            without_checkpoints = _not_sharing(receivers, folder, attempt.owner)
        finally:
            (folder / MARKER).unlink(missing_ok=True)
        if without_checkpoints:
            raise PlacementError(
                f"{len(receivers)} nodes do not share the run's folder {attempt.folder}: {names}; "
                f"{len(without_checkpoints)} of them do not share its checkpoints in {checkpoints} "
                "either; put the run on storage that all nodes share (GPIPE_STORAGE), or set "
                f"{option('SET', 'train.checkpoint_dir=s3://...')}; then the other files are copied"
            )
    log(f"{names}: the run's folder is not shared, its files are copied; checkpoints go to {checkpoints}")
    send_folder(attempt.data, receivers)
    files = ray.put(FolderDelta(attempt.folder, from_now=False).take())
    parts = (attempt.folder, files, attempt.owner)
    folders = run_on_all(receivers, receive_run, *parts, limit_s=ANSWER_S, fault=RUN_NOT_RECEIVED)
    return {node.id: folder for node, folder in folders.items()}


def _not_sharing(nodes: Sequence[Node], folder: Path, mark: str) -> list[Node]:
    """Returns the nodes that do not see a marker file in a folder. The marker stays there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(mark)
    question = (str(folder), [MARKER], node_probe.SETTLE_S, mark)
    unseen = run_on_all(nodes, node_probe.unseen_markers, *question, limit_s=ANSWER_S, fault=RUN_NOT_RECEIVED)
    return [node for node in nodes if unseen[node]]


def receive_run(folder: Path, files: Sequence[FileDelta], mark: str) -> FolderDelta:
    """A Ray task on a node: writes the run's files, unless the folder turns out to be shared. Returns the folder, to
    take later changes from."""
    if not node_probe.has_marker(str(folder), MARKER, mark):
        for name in TEMPORARY:  # left from an earlier attempt
            (folder / name).unlink(missing_ok=True)
        for delta in files:
            apply_delta(folder, delta)
    return FolderDelta(folder, mark=mark)
