"""Refuses a node that does not see a run's folder, which is on one machine or in a folder that all nodes share.

driver   writes a marker file into the folder   ------>   each node looks for it, at the same path
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from experiments.base.hints import command
from launch import node_probe
from launch.ray_nodes import own_node, run_on_all
from suite.errors import PlacementError, WorkerError
from suite.pipeline.planning.placement import Node

ANSWER_S = 180.0
"""Seconds for a node to look for a marker; includes the start of a Ray process."""


def check_shared(nodes: Sequence[Node], folders: Sequence[Path], data: Path) -> None:
    """Looks on all nodes for the ``folders`` that workers write into, and for the prepared ``data``, which may be a
    copy. Raises PlacementError with a node and the folder that it does not see, WorkerError if one does not answer."""
    others = [node for node in dict.fromkeys(nodes) if node.id != own_node()]
    if not others:
        return
    marker = f".gpipe-{uuid.uuid4().hex}"
    places = [str(folder) for folder in folders]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            if fault := node_probe.write_marker(str(folder), marker):
                raise PlacementError(f"cannot write into {folder}: {fault}")
        unseen = run_on_all(others, unseen_folders, places, marker, data, limit_s=ANSWER_S, fault=_no_answer)
    finally:
        for place in places:
            node_probe.remove_markers(place, [marker])
    for node in others:
        for place in unseen[node]:
            raise PlacementError(
                f"node {node.name} does not see the folder {place} of {socket.gethostname()}; mount it there at the "
                "same path, or set GPIPE_STORAGE to a folder that all nodes share"
            )


def unseen_folders(places: Sequence[str], marker: str, data: Path) -> list[str]:
    """A Ray task: returns the folders that this node does not see."""
    unseen = [place for place in places if node_probe.unseen_markers(place, [marker], node_probe.SETTLE_S)]
    return [*unseen, *([] if data.is_dir() else [str(data)])]


def _no_answer(node: Node, why: str) -> WorkerError:
    return WorkerError(f"node {node.name} could not look for the run's folder: {why}; run `{command('doctor')}`")
