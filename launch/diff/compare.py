"""Where two recorded runs first part, by how much, and whether rounding explains it.

weights -> random numbers, outputs, loss -> recomputes -> gradients of inputs and parameters -> sums -> update
           from the first layer on                        from the last layer on
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from suite.errors import SettingError
from suite.training.fingerprints import Fingerprint, Key, RunFingerprints

ROUNDINGS = {"fp32": 100.0, "bf16": 8.0}
"""How many roundings of a precision explain a difference of a layer's tensors. A layer has about ten sums in a row; in
fp32 each has up to some thousand products, and its error grows with the square root of their number. In bf16 factors
and results are rounded, the sums are in fp32."""

MOST_OF_A_BUFFER = 1e-4
"""Buffers that differ by more are others, and not rounded otherwise: averages forget roundings."""

MOST_LAYERS = 8
"""Layers for which the growth of a difference is shown."""

_PHASES = ("initial", "forward", "recomputed", "gradient", "whole", "updated", "buffer")
"""The parts of a step in order, by the first word of a tensor's name; any other word is of a forward."""

_CAUSES = {
    "initial": "the runs start with other weights",
    "forward": "all before is the same: the layer remembers an earlier call, or its code, data or message differ",
    "random": "it drew other random numbers: not as often, or its seed differs",
    "gradient": "its backward differs, or the gradient that came to it",
    "whole": "every micro-batch's gradients are the same: one is missing, added twice or scaled, or the sum "
    "over replicas or copies differs",
    "updated": "all gradients are the same: the optimizer differs",
}

_OPTIONAL = ("recomputed", "gradient", "loss")
"""What a right pipeline may not record: recomputes, deferred gradients, and a loss in another number of parts."""


def phase_of(what: str) -> str:
    """Returns the part of a step in which a tensor is made."""
    first = what.split()[0]
    return first if first in _PHASES else "forward"


def _is_random(what: str) -> bool:
    return what.removeprefix("recomputed ") == "random state"


def _order(key: Key) -> tuple[object, ...]:
    """Returns the place of a tensor in the order in which a difference spreads."""
    step, micro_batch, layer, what = key
    phase = phase_of(what)
    rank = (not _is_random(what)) + what.startswith("loss ")
    return (
        step,
        _PHASES.index(phase),
        -layer if phase == "gradient" else layer,
        rank,
        -1 if micro_batch is None else micro_batch,
        what,
    )


@dataclass(frozen=True)
class Difference:
    key: Key
    a: Fingerprint
    b: Fingerprint

    @property
    def phase(self) -> str:
        return phase_of(self.key[3])

    @property
    def share(self) -> float:
        """The norm of the difference as a share of the tensor's norm; estimated."""
        norm = max(self.a.norm, self.b.norm)
        return self.a.distance(self.b) / norm if norm else 0.0


@dataclass(frozen=True)
class Comparison:
    """Two recorded runs, tensor by tensor."""

    a: RunFingerprints
    b: RunFingerprints
    precision: str
    """Of both runs, the coarser one: fp32 or bf16."""
    equal_count: int
    """Tensors that are equal to the bit."""
    differences: Sequence[Difference]
    """Those that are not, but for buffers; the first one first."""
    other_buffers: Sequence[Difference]
    """Buffers that differ by more than rounding. Those of a pipeline may: BatchNorm's are of whole mini-batches, and
    each replica has its own."""
    unmatched_tensors: Sequence[tuple[str, Key]]
    """Tensors that only one run recorded, with "a" or "b"."""
    wrong_recomputes: Sequence[tuple[str, Key]]
    """Recomputes that are not their forwards, with "a" or "b"."""

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains all differences in the part of a step that has the first one."""
        first = self.first_difference
        return not (self.wrong_recomputes or self.unmatched_tensors) and (first is None or self.explains(first))

    @property
    def first_difference(self) -> Difference | None:
        """The first difference, or the first that rounding does not explain in the same part of a step: later parts
        follow from it."""
        if not self.differences:
            return None
        first = self.differences[0]
        same_part = [one for one in self.differences if one.key[0] == first.key[0] and one.phase == first.phase]
        wrong = [one for one in same_part if not self.explains(one)]
        if not wrong:
            return first
        # the sum over copies of a tied parameter differs with each of them: the layer with another difference has it
        own = next((one for one in wrong if not self.copies_of(one.key)), wrong[0])
        return own if own.key[2] in self.copies_of(wrong[0].key) else wrong[0]

    def explains(self, difference: Difference) -> bool:
        """Whether rounding explains a difference, if all in earlier parts of the step is the same."""
        step, _, layer, what = difference.key
        is_finite = math.isfinite(difference.a.norm) and math.isfinite(difference.b.norm)
        if _is_random(what) or difference.phase == "initial" or not is_finite:
            return False
        if difference.phase == "updated":  # of equal gradients: a shard's last values are not updated as a vector
            before = self.a.tensors.get((step, None, layer, what.replace("updated", "initial", 1)))
            is_lost = before is not None and difference.a.distance(difference.b) >= before.distance(difference.a) / 2
            return difference.share <= torch.finfo(torch.float32).eps and not is_lost
        unit = torch.finfo(torch.bfloat16 if self.precision == "bf16" else torch.float32).eps / 2
        roundings = ROUNDINGS[self.precision] * unit
        if difference.phase != "whole":
            return difference.share <= roundings * len(self.a.layers)
        # each of two sums of M gradients errs by less than (M - 1) u times the sum of their norms
        part = step, layer, what.removeprefix("whole ")
        terms = max(sums.get(part, 0.0) for sums in self._sums_of_norms)
        count = max(self.a.micro_batches, self.b.micro_batches)
        units = count * torch.finfo(torch.float32).eps
        if self.precision == "bf16" or not self.has_same_parts:
            units += roundings
        if not self.has_same_parts:  # rows that cancel, as in the bias of attention's keys, leave errors of their size
            terms = max(terms, self._largest_sums[step, layer])
        return difference.a.distance(difference.b) <= 2 * units * max(terms, difference.a.norm, difference.b.norm)

    def copies_of(self, key: Key) -> list[int]:
        """Returns the other layers with a copy of a parameter, as a run in a pipeline knows them."""
        return self.a.copies_of(key) or self.b.copies_of(key)

    @cached_property
    def _largest_sums(self) -> dict[tuple[int, int], float]:
        """The largest norm of a whole gradient of each step and layer."""
        largest: dict[tuple[int, int], float] = defaultdict(float)
        for run in (self.a, self.b):
            for (step, _, layer, what), one in run.tensors.items():
                if phase_of(what) == "whole":
                    largest[step, layer] = max(largest[step, layer], one.norm)
        return largest

    @cached_property
    def _sums_of_norms(self) -> list[dict[tuple[int, int, str], float]]:
        """For each run the sums of the norms over micro-batches, by step, layer and what."""
        found = []
        for run in (self.a, self.b):
            sums: dict[tuple[int, int, str], float] = defaultdict(float)
            for (step, _, layer, what), one in run.tensors.items():
                sums[step, layer, what] += one.norm
            found.append(sums)
        return found

    @property
    def has_same_parts(self) -> bool:
        """Whether the micro-batches of both runs have the same rows."""
        return self.a.micro_batches == self.b.micro_batches

    def lines(self) -> Iterator[str]:
        """Yields what was found, for people."""
        if not self.has_same_parts:
            counts = (
                f"a has {self.a.micro_batches} micro-batches and b {self.b.micro_batches}: their layers see other rows"
            )
            yield f"{counts}, so only whole gradients and updates are compared"
        for name, key in self.wrong_recomputes[:1]:
            where = f"the first in {name}: {self._described(key)}"
            yield f"{len(self.wrong_recomputes)} recomputes differ from their forwards, {where}"
            cause = "the layer keeps state that is no buffer, or draws from a generator that is not torch's"
            yield f"  {_CAUSES['random'] if _is_random(key[3]) else cause}"
        for name, key in self.unmatched_tensors[:1]:
            where = f"the first in {name}: {self._described(key)}"
            yield f"{len(self.unmatched_tensors)} tensors are in one run alone, {where}"
        for one in self.other_buffers[:1]:
            where = self._described(one.key)
            yield f"{len(self.other_buffers)} buffers differ, which evaluation may use, the first: {where}"
        first = self.first_difference
        if first is None:
            yield f"all {self.equal_count} tensors are the same to the bit"
            return
        explained = self.explains(first)
        kind = "the first that is not:" if explained else "the first that differs by more than rounding:"
        total = self.equal_count + len(self.differences)
        yield f"{self.equal_count} of {total} tensors are the same to the bit; {kind}"
        others = ", ".join(map(str, self.copies_of(first.key)))
        yield f"  {self._described(first.key)}" + (f", with its copies of layer {others}" if others else "")
        norms = f"{first.a.norm:.6g} in a and {first.b.norm:.6g} in b"
        yield f"  it differs by {first.share:.2g} of its norm, which is {norms}"
        if explained:
            yield "  rounding explains it"
        elif self.has_same_parts and not self.wrong_recomputes:
            yield f"  {_CAUSES['random' if _is_random(first.key[3]) else first.phase]}"
        growth = self._growth(first)
        if len(growth) > 1:
            yield "  from there on: " + ", ".join(f"layer {layer} {share:.2g}" for layer, share in growth)

    def _growth(self, first: Difference) -> list[tuple[int, float]]:
        """Returns the largest shares of the layers that a difference of a forward or backward reaches."""
        step, micro_batch, *_ = first.key
        shares: dict[int, float] = {}
        for one in self.differences if first.phase in ("forward", "gradient") else ():
            is_behind = one.key[:2] == (step, micro_batch) and one.phase == first.phase
            if is_behind and not _is_random(one.key[3]):
                shares[one.key[2]] = max(shares.get(one.key[2], 0.0), one.share)
        return list(shares.items())[:MOST_LAYERS]

    def _described(self, key: Key) -> str:
        step, micro_batch, layer, what = key
        where = f"step {step}, layer {layer} ({self.a.layers.get(layer, '?')})"
        return f"{where}, {what}" if micro_batch is None else f"{where}, micro-batch {micro_batch}, {what}"


def compare(a: RunFingerprints, b: RunFingerprints, precision: str) -> Comparison:
    """Compares the tensors that both runs recorded. Raises SettingError for other models, and where both recorded no
    step."""
    for index in sorted(a.layers.keys() | b.layers.keys()):
        here, there = (run.layers.get(index, "none") for run in (a, b))
        if here != there:
            raise SettingError(f"the runs have different models: layer {index} is {here} in a and {there} in b")
    if a.device != b.device:
        raise SettingError(
            f"a ran on {a.device} and b on {b.device}, whose random numbers and initial weights differ; compare two "
            "runs on one kind of device"
        )
    same_parts = a.micro_batches == b.micro_batches
    common = [key for key in a.tensors.keys() & b.tensors.keys() if same_parts or key[1] is None]
    if not common:
        steps = [sorted({key[0] for key in run.tensors}) for run in (a, b)]
        raise SettingError(f"the runs recorded no step in common: a {steps[0]}, b {steps[1]}; train both from one step")
    differing = [key for key in common if a.tensors[key].digest != b.tensors[key].digest]
    found = [Difference(key, a.tensors[key], b.tensors[key]) for key in sorted(differing, key=_order)]
    buffers = [one for one in found if one.phase == "buffer" and one.share > MOST_OF_A_BUFFER]
    found = [one for one in found if one.phase != "buffer"]
    pairs = ("a", a, b), ("b", b, a)
    unmatched = [(name, key) for name, run, other in pairs for key in _unmatched_tensors(run, other, same_parts)]
    wrong = [(name, key) for name, run, _ in pairs for key in _wrong_recomputes(run)]
    return Comparison(a, b, precision, len(common) - len(differing), found, buffers, unmatched, wrong)


def _unmatched_tensors(run: RunFingerprints, other: RunFingerprints, same_parts: bool) -> list[Key]:
    """Returns what only one run recorded, of the steps that both did."""
    steps = {key[0] for key in other.tensors}
    alone = (key for key in run.tensors.keys() - other.tensors.keys() if key[0] in steps)
    required = (key for key in alone if not key[3].startswith(_OPTIONAL))
    return sorted((key for key in required if same_parts or key[1] is None), key=_order)


def _wrong_recomputes(run: RunFingerprints) -> list[Key]:
    """Returns the recomputed tensors that are not those of their forward."""
    recomputed = [key for key in run.tensors if phase_of(key[3]) == "recomputed"]
    forward = {key: (*key[:3], key[3].removeprefix("recomputed ")) for key in recomputed}
    wrong = (key for key in recomputed if run.tensors[key].digest != run.tensors[forward[key]].digest)
    return sorted(wrong, key=_order)
