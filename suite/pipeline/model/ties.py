"""Tied parameters: shared by several layers, on any stages.

Each layer that shares a parameter has a copy of it, even if two of them are on one stage, so sums have the same order
at every K. Copies start with the values of the first one, in the first layer that has the parameter. Their gradients
are summed in layer order before the update. With R > 1 the first copy's values are also copied after the update,
because the sum over replicas may round differently for each copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.layers import check_frozen, ties_of
from suite.pipeline.model.topology import Group, RankCoord

VALUES_AT_ONCE = 1 << 21
"""Values of a copy that are combined at once. Three such parts are in memory, 24 MiB in fp32, whatever the parameter's
size: the embedding of 64,000 entries and width 1,024 alone has 250 MiB."""


@dataclass(frozen=True)
class TiedCopy:
    """One copy of a tied parameter: its stage, layer and name."""

    stage: int
    layer: int
    name: str


def find_ties(
    layers: Sequence[nn.Module], cells: Sequence[range], placement: CellPlacement
) -> dict[str, list[TiedCopy]]:
    """Returns the copies of each tied parameter in layer order.

    Raises SettingError when all parameters are frozen, or only some copies of a tied one (``check_frozen``).
    """
    check_frozen(layers)
    ties: dict[str, list[TiedCopy]] = {}
    for at, cell in enumerate(cells):
        for layer in cell:
            for name, tie in ties_of(layers[layer]).items():
                ties.setdefault(tie, []).append(TiedCopy(placement.stage_of(at), layer, name))
    return ties


def stages_with_copies(ties: dict[str, list[TiedCopy]]) -> list[tuple[int, ...]]:
    """Returns the sets of several stages that hold copies of one parameter, each once."""
    sets = {tuple(sorted({copy.stage for copy in copies})) for copies in ties.values()}
    return sorted(stages for stages in sets if len(stages) > 1)


class TiedParameters:
    """The tied parameters of one stage, and their communication with the other stages that hold copies."""

    def __init__(
        self,
        ties: dict[str, list[TiedCopy]],
        coord: RankCoord,
        parameters: dict[tuple[int, str], nn.Parameter],
        timeout_s: float,
    ) -> None:
        """``parameters`` are this stage's by (layer, name). All ranks must call this: it creates process groups."""
        self._ties, self._coord, self._parameters = ties, coord, parameters
        self._groups: dict[tuple[int, ...], Group] = {}
        for stages in stages_with_copies(ties):
            for replica in range(coord.replicas):
                ranks = [coord.rank_of(replica, stage) for stage in stages]
                group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
                if coord.rank in ranks:
                    self._groups[stages] = group

    def first_copy(self, layer: int, name: str) -> tuple[int, str]:
        """Returns the layer and name of the first copy of a parameter; its own if it is untied."""
        for copies in self._ties.values():
            if any((copy.layer, copy.name) == (layer, name) for copy in copies):
                return copies[0].layer, copies[0].name
        return layer, name

    def is_first_copy(self, layer: int, name: str) -> bool:
        """Whether a parameter is untied or the first copy, which alone counts in a norm and a parameter count."""
        return self.first_copy(layer, name) == (layer, name)

    def parameters(self) -> list[nn.Parameter]:
        """Returns this stage's copies of tied parameters that are not frozen."""
        copies = [parameter for _, copies in sorted(self._ties.items()) for parameter in self._local_copies(copies)]
        return [parameter for parameter in copies if parameter.requires_grad]

    @torch.no_grad()
    def broadcast_first_copy(self) -> None:
        """Gives every copy the values of the first."""
        for _, copies in sorted(self._ties.items()):
            self._combine(copies, [p.data for p in self._local_copies(copies)], first_only=True)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives every copy the sum, in layer order, of all copies' gradients; a frozen parameter has none."""
        for _, copies in sorted(self._ties.items()):
            own_copies = [parameter for parameter in self._local_copies(copies) if parameter.requires_grad]
            for parameter in own_copies:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._combine(copies, [p.grad for p in own_copies if p.grad is not None], first_only=False)

    def _local_copies(self, copies: Sequence[TiedCopy]) -> list[nn.Parameter]:
        return [self._parameters[c.layer, c.name] for c in copies if c.stage == self._coord.stage]

    def _combine(self, copies: Sequence[TiedCopy], own_copies: list[torch.Tensor], first_only: bool) -> None:
        """Replaces each tensor of ``own_copies`` by the first copy's, or by the sum over copies.

        Copies are broadcast and added in layer order; an all-reduce would add in an order that depends on the number of
        ranks.
        """
        if not own_copies:
            return
        flat = [copy.view(-1) for copy in own_copies]
        for start in range(0, flat[0].numel(), VALUES_AT_ONCE):
            self._combine_part(copies, [copy[start : start + VALUES_AT_ONCE] for copy in flat], first_only)

    def _combine_part(self, copies: Sequence[TiedCopy], own_copies: list[torch.Tensor], first_only: bool) -> None:
        group = self._groups.get(tuple(sorted({copy.stage for copy in copies})))
        total: torch.Tensor | None = None
        local = iter(own_copies)
        for copy in copies[:1] if first_only else copies:
            is_local = copy.stage == self._coord.stage
            tensor = next(local).clone() if is_local else torch.empty_like(own_copies[0])
            if group is not None:
                dist.broadcast(tensor, self._coord.rank_of(self._coord.replica, copy.stage), group=group)
            total = tensor if total is None else total.add_(tensor)
        assert total is not None
        for tensor in own_copies:
            tensor.copy_(total)
