"""Parameters that several layers share, on whatever stages those layers are.

Each layer that shares a parameter has a copy of it, also when two of them are on one stage: so sums are made in the
same order at every K. Copies start equal (the owner's values: the first layer that has it), their gradients are summed
in layer order before the update, and equal gradients keep them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from suite.pipeline.layers import check_frozen, ties_of
from suite.pipeline.topology import Group, Place


@dataclass(frozen=True)
class Copy:
    """One copy of a tied parameter: which stage and layer hold it, under which name."""

    stage: int
    layer: int
    name: str


def find_ties(layers: Sequence[nn.Module], cells: Sequence[range], stages: int) -> dict[str, list[Copy]]:
    """Returns the copies of each tied parameter in layer order, cell c being on stage c mod K; the first owns it.

    Raises SettingError when all parameters are frozen, or only some copies of a tied one (``check_frozen``).
    """
    check_frozen(layers)
    ties: dict[str, list[Copy]] = {}
    for at, cell in enumerate(cells):
        for layer in cell:
            for name, tie in ties_of(layers[layer]).items():
                ties.setdefault(tie, []).append(Copy(at % stages, layer, name))
    return ties


class Ties:
    """The tied parameters of one stage, and how it meets the other stages that hold copies."""

    def __init__(
        self,
        ties: dict[str, list[Copy]],
        place: Place,
        parameters: dict[tuple[int, str], nn.Parameter],
        timeout_s: float,
    ) -> None:
        """``parameters`` are this stage's by (layer, name). Every rank must call this: it makes process groups."""
        self._ties, self._place, self._parameters = ties, place, parameters
        self._groups: dict[str, Group] = {}
        for tie in sorted(ties):
            stages = sorted({copy.stage for copy in ties[tie]})
            for replica in range(place.replicas) if len(stages) > 1 else ():
                ranks = [place.rank_of(replica, stage) for stage in stages]
                group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
                if place.rank in ranks:
                    self._groups[tie] = group

    def owned(self, layer: int, name: str) -> bool:
        """Whether a parameter is untied or the owner's copy: what counts once in a norm and in a parameter count."""
        for copies in self._ties.values():
            if any((copy.layer, copy.name) == (layer, name) for copy in copies):
                return (copies[0].layer, copies[0].name) == (layer, name)
        return True

    def parameters(self) -> list[nn.Parameter]:
        """Returns this stage's copies of tied parameters that are not frozen."""
        copies = [parameter for _, copies in sorted(self._ties.items()) for parameter in self._mine(copies)]
        return [parameter for parameter in copies if parameter.requires_grad]

    @torch.no_grad()
    def equalise(self) -> None:
        """Gives every copy the owner's values."""
        for tie, copies in sorted(self._ties.items()):
            self._each(tie, copies, [p.data for p in self._mine(copies)], owner_only=True)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives every copy the sum, in layer order, of all copies' gradients; a frozen parameter has none."""
        for tie, copies in sorted(self._ties.items()):
            mine = [parameter for parameter in self._mine(copies) if parameter.requires_grad]
            for parameter in mine:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._each(tie, copies, [p.grad for p in mine if p.grad is not None], owner_only=False)

    def _mine(self, copies: Sequence[Copy]) -> list[nn.Parameter]:
        return [self._parameters[c.layer, c.name] for c in copies if c.stage == self._place.stage]

    def _each(self, tie: str, copies: Sequence[Copy], mine: list[torch.Tensor], owner_only: bool) -> None:
        """Replaces each tensor of ``mine`` by the owner's, or by the sum over copies.

        Every stage's copies are broadcast and added in layer order rather than all-reduced, whose order of additions
        depends on the number of ranks.
        """
        if not mine:
            return
        total: torch.Tensor | None = None
        local = iter(mine)
        for copy in copies[:1] if owner_only else copies:
            here = copy.stage == self._place.stage
            tensor = next(local).clone() if here else torch.empty_like(mine[0])
            if tie in self._groups:
                source = self._place.rank_of(self._place.replica, copy.stage)
                dist.broadcast(tensor, source, group=self._groups[tie])
            total = tensor if total is None else total.add_(tensor)
        assert total is not None
        for tensor in mine:
            tensor.copy_(total)
