"""Skips: tensors that pass by the layers between the one that gives them and the one that takes them.

    layer 0      layer 1      layer 2      layer 3          A layer that has ``gives = ("a",)`` returns a's tensor after
      gives a ------------------> takes a                   its own outputs; one that has ``takes = ("a",)`` gets it
                 gives b ------------------> takes b        after its own inputs. One giver, one taker, in this order.

Between stages a skip goes straight from the giver's to the taker's, not through the stages between. Where it is also
the output that the next stage gets anyway, the same tensor, it is sent once. Between two cells of one stage it stays on
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.boundary import Boundary, Front, narrowed
from suite.pipeline.layers import Tensors, as_tuple
from suite.pipeline.topology import CellPair

Stash = dict[str, Tensor]
"""Skips given and not taken yet, by name."""


def takes_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the skips that a layer takes, in the order of its last arguments."""
    return tuple(getattr(layer, "takes", ()))


def gives_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the skips that a layer gives, in the order of its last results."""
    return tuple(getattr(layer, "gives", ()))


def call(layer: nn.Module, tensors: Tensors, stash: Stash, narrow: bool = False) -> Tensors:
    """Runs one layer, its skips taken from and given to ``stash``; returns what the next layer takes, in bf16 where
    asked to ``narrow`` it."""
    taken = [stash.pop(name) for name in takes_of(layer)]
    results, gives = as_tuple(layer(*tensors, *taken)), gives_of(layer)
    if narrow:
        results = narrowed(results)
    if not gives:
        return results
    stash.update(zip(gives, results[-len(gives) :], strict=True))
    return results[: -len(gives)]


@dataclass(frozen=True, slots=True)
class Skip:
    """One skip: its name and the layers that give and take it."""

    name: str
    giver: int
    taker: int


def find_skips(layers: Sequence[nn.Module]) -> tuple[Skip, ...]:
    """Returns all skips in the order in which they are taken.

    Raises SettingError with every fault: a skip given or taken twice, taken and never given, given and never taken, or
    taken by a layer that does not come after the one that gives it.
    """
    givers, takers = (_by_name(layers, names) for names in (gives_of, takes_of))
    faults = []
    for name in sorted(givers.keys() | takers.keys()):
        given, taken = givers.get(name, []), takers.get(name, [])
        for verb, who in (("given", given), ("taken", taken)):
            if len(who) > 1:
                faults.append(f"{name} is {verb} by layers {', '.join(map(str, who))}, one may")
        if not given:
            faults.append(f"{name} is taken by layer {taken[0]} and given by none")
        elif not taken:
            faults.append(f"{name} is given by layer {given[0]} and taken by none")
        elif taken[0] <= given[0]:
            faults.append(
                f"{name} is taken by layer {taken[0]}, which does not come after layer {given[0]} that gives it"
            )
    if faults:
        raise SettingError(
            f"the layers' skips do not agree: {'; '.join(faults)}; each name needs one layer that gives it and a later "
            "one that takes it"
        )
    skips = (Skip(name, givers[name][0], taken[0]) for name, taken in takers.items())
    return tuple(sorted(skips, key=lambda skip: (skip.taker, takes_of(layers[skip.taker]).index(skip.name))))


def communicating_pairs(skips: Sequence[Skip], cells: Sequence[range], stages: int) -> list[CellPair]:
    """Returns all pairs of cells between whose stages messages go: neighbours, and those that a skip connects."""
    cell_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
    lanes = {(at, at + 1) for at in range(len(cells) - 1)}
    lanes |= {(cell_of[skip.giver], cell_of[skip.taker]) for skip in skips}
    return sorted((giver, taker) for giver, taker in lanes if giver % stages != taker % stages)


def _by_name(layers: Sequence[nn.Module], names_of: Callable[[nn.Module], tuple[str, ...]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name in names_of(layer):
            found.setdefault(name, []).append(index)
    return found


@dataclass(frozen=True)
class Cargo:
    """What crosses into a stage, or out of it, for one micro-batch: each tensor once, and who it is from or for."""

    boundary: Boundary
    main: int
    """The first so many are what the first layer gets, or the last one returns."""
    skips: tuple[tuple[str, int], ...]
    """Name and place of each skip; two names may share a place, or lie among the first ``main``."""
    lanes: tuple[tuple[int, tuple[int, ...]], ...]
    """The other stages, and the places of what is from or for each."""

    @property
    def back(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The lanes of the gradients: the same, without what has none."""
        return tuple(
            (peer, tuple(at for at in places if self.boundary[at].needs_gradient)) for peer, places in self.lanes
        )

    def pack(self, tensors: Tensors, stash: Stash) -> Tensors:
        """Returns a cell's results in their places; takes them out of the stash."""
        packed = list(tensors)
        for name, place in self.skips:
            tensor = stash.pop(name)
            if place == len(packed):
                packed.append(tensor)
            assert packed[place].shape == tensor.shape, f"{name} is not the output that it was announced as"
        assert len(packed) == len(self.boundary), f"{len(packed)} tensors leave the stage, not {len(self.boundary)}"
        return tuple(packed)

    def unpack(self, tensors: Tensors) -> tuple[Tensors, Stash]:
        """Returns what the first layer gets, and the skips."""
        return tensors[: self.main], {name: tensors[place] for name, place in self.skips}


class Routes:
    """The ways of skips through one stage: which come from and go to which other stages."""

    def __init__(self, skips: Sequence[Skip], cells: Sequence[range], stage: int) -> None:
        self._stage = stage
        self.names = tuple(skip.name for skip in skips)
        stage_of = {layer: k for k, cell in enumerate(cells) for layer in cell}
        ways = [(skip.name, stage_of[skip.giver], stage_of[skip.taker]) for skip in skips]
        self.taken = tuple((name, giver) for name, giver, taker in ways if taker == stage and giver != stage)
        self.given = tuple((name, taker) for name, giver, taker in ways if giver == stage and taker != stage)

    def arriving(self, front: Front) -> Cargo:
        """Returns what enters the stage at a front."""
        return _cargo(front, self.taken, self._stage - 1)

    def leaving(self, front: Front) -> Cargo:
        """Returns what leaves the stage at the front behind it."""
        return _cargo(front, self.given, self._stage + 1)

    def ahead(self, front: Front) -> Front:
        """Returns the front behind the stage as the next stage needs it: with all that is alive, and what of it is the
        same tensor only where both belong to this stage."""
        own = {name for name, _ in self.given}
        return Front(front.main, tuple(one if one.name in own else one.apart() for one in front.skips))


def _cargo(front: Front, ways: Sequence[tuple[str, int]], neighbour: int) -> Cargo:
    """Lays out the tensors of a front: those between neighbouring layers, then each skip that is none of them."""
    boundary, places = list(front.main), []
    lanes: dict[int, list[int]] = {neighbour: list(range(len(front.main)))}
    alive = {one.name: one for one in front.skips}
    for name, peer in ways:
        one = alive[name]
        if peer == neighbour and one.same is not None:
            places.append((name, one.same))
            continue
        places.append((name, len(boundary)))
        lanes.setdefault(peer, []).append(len(boundary))
        boundary.append(one.spec)
    ordered = tuple((peer, tuple(at)) for peer, at in sorted(lanes.items()))
    return Cargo(tuple(boundary), len(front.main), tuple(places), ordered)
