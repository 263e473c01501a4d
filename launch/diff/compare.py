"""Where two recorded runs first part, by how much, and whether rounding explains it.

weights -> random numbers, outputs, loss -> recomputes -> gradients of inputs and parameters -> sums -> update
           from the first layer on                        from the last layer on
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from suite.errors import SettingError
from suite.training.fingerprints import Fingerprint, Key, Recorded

ROUNDINGS = 100.0
"""How many roundings explain a difference of a layer's tensors: a layer has about ten sums in a row, of up to some
thousand products, whose relative errors grow with the square root of their length."""

MOST_LAYERS = 8
"""Layers for which the growth of a difference is shown."""

_PHASES = ("initial", "forward", "recompute", "backward", "sum", "update")

_CAUSES = {
    "initial": "the runs start with other weights",
    "forward": "what it got and the random numbers are the same: it computes something else, or remembers something "
    "from another forward",
    "random": "it drew other random numbers: not as often, or its seed differs",
    "recompute": "what it got is the same",
    "backward": "all forwards and the gradients behind it are the same: its backward differs",
    "sum": "every micro-batch's gradients are the same: one is missing, added twice or scaled, or the sum "
    "over replicas or copies differs",
    "update": "all gradients are the same: the optimizer differs",
}


def phase_of(what: str) -> str:
    """Returns the part of a step in which a tensor is made."""
    first = what.split()[0]
    return {"initial": "initial", "recomputed": "recompute", "gradient": "backward", "whole": "sum"}.get(
        first, "update" if first == "updated" else "forward"
    )


def _order(key: Key) -> tuple[object, ...]:
    """Returns the place of a tensor in the order in which a difference spreads."""
    step, micro_batch, layer, what = key
    phase = phase_of(what)
    rank = ("random" not in what) + ("loss" in what)
    return (
        step,
        _PHASES.index(phase),
        -layer if phase == "backward" else layer,
        rank,
        -1 if micro_batch is None else micro_batch,
        what,
    )


@dataclass(frozen=True)
class Difference:
    """A tensor that differs."""

    key: Key
    a: Fingerprint
    b: Fingerprint

    @property
    def share(self) -> float:
        """The norm of the difference, of the tensor's norm; estimated."""
        norm = max(self.a.norm, self.b.norm)
        return self.a.distance(self.b) / norm if norm else 0.0


@dataclass(frozen=True)
class Comparison:
    """Two recorded runs, tensor by tensor."""

    a: Recorded
    b: Recorded
    precision: str
    """Of both runs, the coarser one: fp32 or bf16."""
    same: int
    """Tensors that are equal to the bit."""
    differences: tuple[Difference, ...]
    """All others, the first one first."""
    broken: tuple[tuple[str, Key], ...]
    """Recomputes that are not their forwards, with "a" or "b"."""

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the first difference, if there is one."""
        return not self.broken and (not self.differences or self.explains(self.differences[0]))

    def explains(self, difference: Difference) -> bool:
        """Whether a tensor may differ by so much if all before it is the same and sums are in another order."""
        unit = torch.finfo(torch.bfloat16 if self.precision == "bf16" else torch.float32).eps / 2
        step, _, layer, what = difference.key
        phase = phase_of(what)
        if "random" in what or phase == "initial":
            return False
        if phase != "sum":
            return phase != "update" and difference.share <= ROUNDINGS * unit
        # each of two sums of M gradients errs by less than (M - 1) u times the sum of their norms
        count = max(self.a.micro_batches, self.b.micro_batches)
        terms = max(
            sum(one.norm for key, one in run.tensors.items() if key[0] == step and key[2:] == (layer, what[6:]))
            for run in (self.a, self.b)
        )
        bound = max(terms, difference.a.norm, difference.b.norm) * torch.finfo(torch.float32).eps * count
        same_parts = self.a.micro_batches == self.b.micro_batches
        return difference.a.distance(difference.b) <= 2 * bound * (1 if same_parts else ROUNDINGS)

    def lines(self) -> Iterator[str]:
        """Yields what was found, for people."""
        if self.a.micro_batches != self.b.micro_batches:
            yield (
                f"a has {self.a.micro_batches} micro-batches and b {self.b.micro_batches}: their layers see other "
                "rows, so only sums over the mini-batch are compared"
            )
        for name, key in self.broken[:1]:
            yield f"{len(self.broken)} recomputes are not their forwards, the first in {name}: {self._described(key)}"
            yield (
                f"  {_CAUSES['random']}"
                if "random" in key[3]
                else "  the layer keeps state that is no buffer, or draws from a generator that is not torch's"
            )
        if not self.differences:
            yield f"all {self.same} tensors are the same to the bit"
            return
        first, total = self.differences[0], self.same + len(self.differences)
        explained = self.explains(first)
        yield f"{self.same} of {total} tensors are the same to the bit; the first that is not:"
        yield f"  {self._described(first.key)}"
        norms = f"{first.a.norm:.6g} in a and {first.b.norm:.6g} in b"
        yield f"  it differs by {first.share:.2g} of its norm, which is {norms}"
        yield "  rounding explains it" if explained else "  rounding does not explain it"
        if not explained and not self.broken:
            yield f"  {_CAUSES['random' if 'random' in first.key[3] else phase_of(first.key[3])]}"
        growth = self._growth(first)
        if len(growth) > 1:
            yield "  from there on: " + ", ".join(f"layer {layer} {share:.2g}" for layer, share in growth)

    def _growth(self, first: Difference) -> list[tuple[int, float]]:
        """Returns the largest shares of the layers that the first difference reaches in its phase."""
        step, micro_batch, _, what = first.key
        shares: dict[int, float] = {}
        for one in self.differences:
            is_behind = one.key[:2] == (step, micro_batch) and phase_of(one.key[3]) == phase_of(what)
            if is_behind and "random" not in one.key[3]:
                shares[one.key[2]] = max(shares.get(one.key[2], 0.0), one.share)
        return list(shares.items())[:MOST_LAYERS]

    def _described(self, key: Key) -> str:
        step, micro_batch, layer, what = key
        where = f"step {step}, layer {layer} ({self.a.layers.get(layer, '?')})"
        return f"{where}, {what}" if micro_batch is None else f"{where}, micro-batch {micro_batch}, {what}"


def compare(a: Recorded, b: Recorded, precision: str) -> Comparison:
    """Compares the tensors that both runs recorded. Raises SettingError for other models, and where both recorded no
    step."""
    if a.layers != b.layers:
        for index in sorted(a.layers.keys() | b.layers.keys()):
            here, there = (run.layers.get(index, "none") for run in (a, b))
            if here != there:
                raise SettingError(f"the runs have different models: layer {index} is {here} in a and {there} in b")
    same_parts = a.micro_batches == b.micro_batches
    common = [key for key in a.tensors.keys() & b.tensors.keys() if same_parts or key[1] is None]
    if not common:
        steps = [sorted({key[0] for key in run.tensors}) for run in (a, b)]
        raise SettingError(f"the runs recorded no step in common: a {steps[0]}, b {steps[1]}; train both from one step")
    differing = [key for key in common if a.tensors[key].digest != b.tensors[key].digest]
    found = [Difference(key, a.tensors[key], b.tensors[key]) for key in sorted(differing, key=_order)]
    broken = [(name, key) for name, run in (("a", a), ("b", b)) for key in sorted(_broken(run), key=_order)]
    return Comparison(a, b, precision, len(common) - len(found), tuple(found), tuple(broken))


def _broken(run: Recorded) -> list[Key]:
    """Returns the recomputed tensors that are not those of their forward."""
    recomputed = [key for key in run.tensors if phase_of(key[3]) == "recompute"]
    forward = {key: (*key[:3], key[3].removeprefix("recomputed ")) for key in recomputed}
    return [key for key in recomputed if run.tensors[key].digest != run.tensors[forward[key]].digest]
