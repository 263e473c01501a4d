"""Skips: tensors that bypass the layers between the one that stashes them and the one that pops them.

    layer 0      layer 1      layer 2      layer 3
    stashes a -----------------> pops a                   ``gpipe_stashes = ("a",)``: returns a after its own outputs
                 stashes b -----------------> pops b      ``gpipe_pops = ("a",)``: takes a after its own inputs

Each name has one stash and one later pop.

A skip goes directly from the stashing stage to the popping one, not through the stages between (as in torchgpipe). If
it is the same tensor as an output that the next stage gets anyway, it is sent once. Between two cells of one stage it
stays on the device.

Wherever the cells end, the gradients of a tensor with several consumers are added in one order, so the sums have the
same bits (``shared_as_views``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.cells import CellPlacement
from suite.pipeline.model.layers import Tensors, as_tuple
from suite.pipeline.model.topology import CellPair, MessageKind
from suite.pipeline.runtime.boundary import Boundary, CutSpec, to_bf16

Stash = dict[str, Tensor]
"""Skips stashed and not popped yet, by name."""


def pops_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the skips that a layer pops, in the order of its last arguments."""
    return tuple(getattr(layer, "gpipe_pops", ()))


def stashes_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the skips that a layer stashes, in the order of its last outputs."""
    return tuple(getattr(layer, "gpipe_stashes", ()))


def call(layer: nn.Module, tensors: Tensors, stash: Stash, bf16: bool = False) -> Tensors:
    """Runs one layer, with its skips from and to ``stash``; returns the next layer's inputs, with ``bf16`` cast to
    it (``to_bf16``)."""
    popped = [stash.pop(name) for name in pops_of(layer)]
    outputs, stashes = as_tuple(layer(*tensors, *popped)), stashes_of(layer)
    if bf16:
        outputs = to_bf16(outputs)
    main = len(outputs) - len(stashes)
    outputs = shared_as_views(outputs, main)
    stash.update(zip(stashes, outputs[main:], strict=True))
    return outputs[:main]


def shared_as_views(tensors: Tensors, main: int) -> Tensors:
    """Returns the tensors with a view in place of each occurrence of one that occurs several times.

    Each consumer gets its own view. Autograd adds the gradients of the views in reverse order of their creation, so
    they are created such that the first of ``main`` comes first, then skips, then repeats among ``main``. A neighbour
    that gets the first two as one tensor returns their sum, with which this sum also begins: the same bits.
    """
    ids = [id(tensor) for tensor in tensors]
    if len({*ids}) == len(ids):
        return tensors
    order = sorted(range(len(tensors)), key=lambda at: (at < main and ids.index(ids[at]) < at, at >= main, at))
    views = list(tensors)
    for at in reversed(order):
        if tensors[at].requires_grad and ids.count(ids[at]) > 1:
            views[at] = tensors[at].view_as(tensors[at])
    return tuple(views)


@dataclass(frozen=True, slots=True)
class Skip:
    """One skip: its name and the layers that stash and pop it."""

    name: str
    source: int
    target: int


def find_skips(layers: Sequence[nn.Module]) -> tuple[Skip, ...]:
    """Returns all skips in the order in which they are popped.

    Raises SettingError with every fault: a skip stashed or popped twice, popped but never stashed, stashed but never
    popped, or popped by a layer that does not come after the one that stashes it.
    """
    stash_layers, pop_layers = (_by_name(layers, names) for names in (stashes_of, pops_of))
    faults = []
    for name in sorted(stash_layers.keys() | pop_layers.keys()):
        stashed, popped = stash_layers.get(name, []), pop_layers.get(name, [])
        for verb, indices in (("stashed", stashed), ("popped", popped)):
            if len(indices) > 1:
                faults.append(f"{name} is {verb} by layers {', '.join(map(str, indices))}, only one may")
        if not stashed:
            faults.append(f"{name} is popped by layer {popped[0]} and stashed by none")
        elif not popped:
            faults.append(f"{name} is stashed by layer {stashed[0]} and popped by none")
        elif popped[0] <= stashed[0]:
            faults.append(
                f"{name} is popped by layer {popped[0]}, which does not come after layer {stashed[0]} that stashes it"
            )
    if faults:
        raise SettingError(
            f"the layers' skips do not match: {'; '.join(faults)}; each name needs one layer that stashes it and a "
            "later one that pops it"
        )
    skips = (Skip(name, stash_layers[name][0], popped[0]) for name, popped in pop_layers.items())
    return tuple(sorted(skips, key=lambda skip: (skip.target, pops_of(layers[skip.target]).index(skip.name))))


def communicating_pairs(skips: Sequence[Skip], cells: Sequence[range], placement: CellPlacement) -> list[CellPair]:
    """Returns all pairs of cells that exchange messages: neighbours, and cells that a skip connects."""
    cell_of = {layer: at for at, cell in enumerate(cells) for layer in cell}
    pairs = {(at, at + 1) for at in range(len(cells) - 1)}
    pairs |= {(cell_of[skip.source], cell_of[skip.target]) for skip in skips}
    return sorted((source, target) for source, target in pairs if placement.crosses(source, target))


def _by_name(layers: Sequence[nn.Module], names_of: Callable[[nn.Module], tuple[str, ...]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        for name in names_of(layer):
            found.setdefault(name, []).append(index)
    return found


@dataclass(frozen=True)
class CellBoundary:
    """The tensors that enter or leave a cell for one micro-batch, each once, and the cells they come from or go to."""

    tensors: Boundary
    main: int
    """How many of them, from the first, are inputs of the first layer or outputs of the last one."""
    skips: tuple[tuple[str, int], ...]
    """Name and index of each skip, which may be one of the first ``main``."""
    peers: tuple[tuple[int, tuple[int, ...]], ...]
    """The other cells, and the indices of the tensors from or for each."""

    def peers_of(self, kind: MessageKind) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns ``peers``; for gradients without the tensors that have none."""
        if kind == "activations":
            return self.peers
        return tuple(
            (peer, tuple(at for at in indices if self.tensors[at].needs_gradient)) for peer, indices in self.peers
        )

    def pack(self, tensors: Tensors, stash: Stash) -> Tensors:
        """Returns a cell's outputs and stashed skips in the boundary's order; removes the skips from ``stash``."""
        packed = list(tensors)
        for name, index in self.skips:
            tensor = stash.pop(name)
            if index == len(packed):
                packed.append(tensor)
            assert packed[index].shape == tensor.shape, f"{name} is not the output that the metadata says it is"
        assert len(packed) == len(self.tensors), f"the cell has {len(packed)} outputs, not {len(self.tensors)}"
        return tuple(packed)

    def unpack(self, tensors: Tensors) -> tuple[Tensors, Stash]:
        """Returns the first layer's inputs, and the skips."""
        indices = (*range(self.main), *(index for _, index in self.skips))
        views = shared_as_views(tuple(tensors[index] for index in indices), self.main)
        return views[: self.main], {name: view for (name, _), view in zip(self.skips, views[self.main :], strict=True)}


class SkipLayout:
    """The skips of one cell: which of them come from and go to which other cells."""

    def __init__(self, skips: Sequence[Skip], cells: Sequence[range], cell: int) -> None:
        self._cell = cell
        self.names = tuple(skip.name for skip in skips)
        cell_of = {layer: at for at, layers in enumerate(cells) for layer in layers}
        ends = [(skip.name, cell_of[skip.source], cell_of[skip.target]) for skip in skips]
        self.popped = tuple((name, source) for name, source, target in ends if target == cell and source != cell)
        self.stashed = tuple((name, target) for name, source, target in ends if source == cell and target != cell)

    def input_boundary(self, cut: CutSpec) -> CellBoundary:
        """Returns the boundary at the cut before the cell."""
        return _cell_boundary(cut, self.popped, self._cell - 1)

    def output_boundary(self, cut: CutSpec) -> CellBoundary:
        """Returns the boundary at the cut behind the cell."""
        return _cell_boundary(cut, self.stashed, self._cell + 1)

    def next_cut(self, cut: CutSpec) -> CutSpec:
        """Returns the cut behind the cell as the next cell needs it: with all open skips, each as its own tensor
        unless this cell stashed it."""
        own = {name for name, _ in self.stashed}
        return CutSpec(cut.main, tuple(skip if skip.name in own else skip.as_own_tensor() for skip in cut.skips))


def _cell_boundary(cut: CutSpec, skip_peers: Sequence[tuple[str, int]], neighbour: int) -> CellBoundary:
    """Lays out the tensors of a cut: those between neighbouring layers, then each skip that is none of them."""
    tensors, skips = list(cut.main), []
    indices_of: dict[int, list[int]] = {neighbour: list(range(len(cut.main)))}
    open_skips = {skip.name: skip for skip in cut.skips}
    for name, peer in skip_peers:
        skip = open_skips[name]
        if peer == neighbour and skip.same_as_output is not None:
            skips.append((name, skip.same_as_output))
            continue
        skips.append((name, len(tensors)))
        indices_of.setdefault(peer, []).append(len(tensors))
        tensors.append(skip.spec)
    peers = tuple((peer, tuple(indices)) for peer, indices in sorted(indices_of.items()))
    return CellBoundary(tuple(tensors), len(cut.main), tuple(skips), peers)
