"""The links between a worker's cells and those of other workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from suite.pipeline.model.cells import cell_of
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.executor import CellLinks
from suite.pipeline.runtime.p2p import Deadline, LocalMessages, P2PCommunicator, warm_up
from suite.pipeline.runtime.skip import SkipLayout, find_skips
from suite.pipeline.schedule.config import ScheduleConfig


def make_links(
    coord: RankCoord, layers: Sequence[nn.Module], cells: Sequence[range], groups: ProcessGroups, device: torch.device,
    deadline: Deadline, schedule_config: ScheduleConfig,
) -> list[CellLinks]:  # fmt: skip
    """Returns the links of each of this worker's cells to other cells. Every rank must call this."""
    skips, links = find_skips(layers), []
    flow, local = schedule_config.flow_control(coord.stages), LocalMessages()
    for virtual_stage in range(schedule_config.virtual_stages):
        skip_layout = SkipLayout(skips, cells, cell_of(virtual_stage, coord.stage, coord.stages))
        p2p = None
        if coord.stages > 1:
            p2p = P2PCommunicator(coord, groups, device, deadline, local, virtual_stage, flow)
        links.append(CellLinks(skip_layout, p2p))
    warm_up(coord, groups, device)
    return links
