"""Writing through a pipeline, forward only: groups of sentences take turns over the stages, a token at a time.

    K = 3, the entry (``suite.pipeline.incremental``) on stage 1, groups a, b, c, two of them under way at once

    stage 0   A  B  C  .  .  .  .  .  .        A  a's source and first token through all its layers
    stage 1   .  A  B  a  b  a  C  b  c        a  one more token of a, through the layers that extend
    stage 2   .  .  A  B  a  b  .  C  b  c     after each, the search of its group chooses how it goes on

The last stage sends each choice (``Move``) to the stages from the entry on: to the entry the tokens matter, to all the
order of the hypotheses and which sentences are left. When a group is over the next one takes its turns; all stages hear
the same moves in the same order, so all know whose turn it is and nobody directs them. Stages before the entry only
begin groups, as far ahead as what they send is taken.

K is not part of the result: the same layers compute on the same tensors, whoever holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from suite.pipeline.incremental import Cache, Move, Part
from suite.pipeline.layers import Tensors
from suite.pipeline.parcels import Lane
from suite.pipeline.topology import Groups, Place
from suite.pipeline.transport import Deadline

PATIENCE = 300.0
"""Seconds that a stage waits for another: it may have whole groups before it."""

_RUN_AHEAD = 2
"""Groups begun before the entry and not taken yet."""


class Search(Protocol):
    """What chooses tokens for one group."""

    def advance(self, logits: Tensor) -> Move:
        """Returns how the group goes on after the logits of its newest tokens."""


@dataclass
class _UnderWay:
    """A group on one stage."""

    number: int
    sentences: int
    caches: list[Cache]
    hypotheses: int = 1

    def apply(self, move: Move) -> None:
        move.apply(self.caches, self.sentences, self.hypotheses)
        self.sentences, self.hypotheses = move.tokens.shape


class Decoder:
    """One stage's part in writing."""

    def __init__(self, place: Place, part: Part, entry: int, groups: Groups | None, device: torch.device) -> None:
        """``entry`` is the stage of the first layer that extends; ``groups`` None with a single stage."""
        self._place, self._part, self._entry, self._device = place, part, entry, device
        self._under_way = place.stages - entry + 1 if place.stages > entry + 1 else 1
        deadline, last, me = Deadline(PATIENCE), place.stages - 1, place.stage

        def lane(peer: int, back: bool, unsent: int) -> Lane:
            assert groups is not None
            group, where = (groups.gradients if back else groups.activations)[0], "cpu" if back else device
            return Lane(place.rank_of(0, peer), f"stage {peer}", group, torch.device(where), deadline, unsent)

        writes = me >= entry
        self._before = lane(me - 1, False, 0) if me > 0 else None
        # one more than can be under way: writing stages must never wait for each other in a circle
        self._behind = lane(me + 1, False, self._under_way + 1 if writes else _RUN_AHEAD) if me < last else None
        self._choices = lane(last, True, 0) if writes and me < last else None
        self._writers = [lane(peer, True, self._under_way + 1) for peer in range(entry, last)] if me == last else []

    def run(
        self, sources: Sequence[Tensor], first: int, search: Callable[[int], Search], over: Callable[[int], None]
    ) -> None:
        """Decodes groups, each of source ids (sentences, time), after the token ``first``. All stages must call it.

        On the last stage ``search(i)`` is what chooses for group i, and ``over(i)`` hears when it is done. Raises
        StallError when another stage keeps this one waiting.
        """
        coming = iter(range(len(sources)))
        if self._place.stage < self._entry:
            for number in coming:
                self._begin(number, sources[number], first)
        else:
            turns = [self._all_groups(coming, sources, first, search, over) for _ in range(self._under_way)]
            while turns:
                turns = [turn for turn in turns if next(turn, None) is not None]
        for sent in (self._behind, *self._writers):
            if sent is not None:
                sent.flush()

    def _all_groups(
        self, coming: Iterator[int], sources: Sequence[Tensor], first: int, search: Callable[[int], Search],
        over: Callable[[int], None],
    ) -> Iterator[bool]:  # fmt: skip
        """Takes one group after the other from what is coming; yields after each turn of one."""
        for number in coming:
            outputs, caches = self._begin(number, sources[number], first)
            group = _UnderWay(number, len(sources[number]), caches)
            chooser = search(number) if self._place.last else None
            while True:
                chosen = self._chosen(chooser, outputs[0]) if chooser is not None else None
                yield True
                move = chosen if chosen is not None else self._heard(number)
                if move.over:
                    break
                outputs = self._extend(group, move)
            if chooser is not None:
                over(number)

    def _begin(self, number: int, source: Tensor, first: int) -> tuple[Tensors, list[Cache]]:
        if self._before is None:
            source = source.to(self._device)
            inputs: Tensors = source, source.new_full((len(source), 1), first)
        else:
            inputs = self._before.take(f"the beginning of group {number}")
        outputs, caches = self._part.begin(inputs)
        if self._behind is not None:
            self._behind.send(outputs)
        return outputs, caches

    def _extend(self, group: _UnderWay, move: Move) -> Tensors:
        group.apply(move)
        if self._place.stage == self._entry:
            inputs: Tensors = (move.tokens.view(-1, 1),)
        else:
            assert self._before is not None
            inputs = self._before.take(f"the next token of group {group.number}")
        outputs = self._part.extend(group.caches, inputs)
        if self._behind is not None:
            self._behind.send(outputs)
        return outputs

    def _chosen(self, chooser: Search, logits: Tensor) -> Move:
        move = chooser.advance(logits)
        for writer in self._writers:
            writer.send(tuple(part.cpu() for part in (move.kept, move.parents, move.tokens)))
        return move

    def _heard(self, number: int) -> Move:
        assert self._choices is not None
        return Move(*self._choices.take(f"the choice for group {number}")).to(self._device)
