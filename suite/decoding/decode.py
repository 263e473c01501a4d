"""Decodes through a pipeline: groups of sentences are pipelined over the stages, one token at a time.

    K = 3, the entry (``suite.decoding.kv_cache``) on stage 1, groups a, b, c, two of them in flight

    stage 0   A  B  C  .  .  .  .  .  .        A  prefill: a's source and first token through all layers
    stage 1   .  A  B  a  b  a  C  b  c        a  decode step: one more token of a, through cached layers
    stage 2   .  .  A  B  a  b  .  C  b  c     after each, the last stage chooses the next tokens

The last stage sends each choice (``BeamUpdate``) to the stages from the entry on. The entry needs the tokens, all of
them the order of the hypotheses and the remaining sentences. When a group is done the next one takes its slot. All
stages get the same updates in the same order, so they agree on the order of groups without a coordinator. Stages before
the entry only run prefills, as far ahead as their messages are received.

Results do not depend on K: the same layers compute on the same tensors, on whatever stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from suite.decoding.kv_cache import BeamUpdate, CachedLayers, LayerCache
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import ProcessGroups, RankCoord
from suite.pipeline.runtime.p2p import MessageTimeout
from suite.pipeline.runtime.tensor_channel import TensorChannel

DECODE_TIMEOUT_S = 300.0
"""Seconds that a stage waits for another, which may run whole groups first."""

_RUN_AHEAD = 2
"""Prefills sent by stages before the entry and not received yet."""


class Search(Protocol):
    """Chooses the tokens of one group."""

    def advance(self, logits: Tensor) -> BeamUpdate:
        """Returns how the group continues after the logits of its newest tokens."""


class Decoder:
    """Decodes on one stage."""

    def __init__(
        self, coord: RankCoord, part: CachedLayers, entry: int, groups: ProcessGroups | None, device: torch.device
    ) -> None:
        """``entry`` is the stage of the first cached layer; ``groups`` is None for a single stage."""
        self._coord, self._part, self._entry, self._device = coord, part, entry, device
        self._groups_in_flight = coord.stages - entry + 1 if coord.stages > entry + 1 else 1
        timeout, last, stage = MessageTimeout(DECODE_TIMEOUT_S), coord.stages - 1, coord.stage

        def channel(peer: int, backward: bool, max_inflight_sends: int) -> TensorChannel:
            assert groups is not None
            group = (groups.gradients if backward else groups.activations)[0]
            on = torch.device("cpu") if backward else device
            return TensorChannel(coord.rank_of(0, peer), f"stage {peer}", group, on, timeout, max_inflight_sends)

        decodes = stage >= entry
        self._previous_stage = channel(stage - 1, False, 0) if stage > 0 else None
        # one more than can be in flight, so that decoding stages never wait for each other in a circle
        self._next_stage = (
            channel(stage + 1, False, self._groups_in_flight + 1 if decodes else _RUN_AHEAD) if stage < last else None
        )
        self._choice_channel = channel(last, True, 0) if decodes and stage < last else None
        self._decoding_stages = (
            [channel(peer, True, self._groups_in_flight + 1) for peer in range(entry, last)] if stage == last else []
        )

    def run(
        self,
        sources: Sequence[Tensor],
        first: int | None,
        search: Callable[[int], Search],
        on_finished: Callable[[int], None],
    ) -> None:
        """Decodes groups, each of source ids (sentences, time), after the token ``first``; None continues the source,
        as a decoder-only model does. All stages must call it.

        On the last stage ``search(i)`` returns the search of group i, and ``on_finished(i)`` is called when it is done.
        Raises StallError when another stage does not respond in time.
        """
        remaining = enumerate(sources)

        def run_groups() -> Iterator[bool]:
            """Runs the remaining groups one after the other; yields after each step of one."""
            for number, source in remaining:
                yield from self._run_group(number, source, first, search(number) if self._coord.has_loss else None)
                if self._coord.has_loss:
                    on_finished(number)

        # bf16 casts each weight once: autocast keeps a copy until its outermost context ends. It keeps none in
        # inference mode, so the layers run under torch.no_grad
        with torch.autocast(self._device.type, enabled=False):
            if self._coord.stage < self._entry:
                for number, source in remaining:
                    self._begin(number, source, first)
            else:
                group_runs = [run_groups() for _ in range(self._groups_in_flight)]
                while group_runs:
                    group_runs = [group_run for group_run in group_runs if next(group_run, False)]
            for sent in (self._next_stage, *self._decoding_stages):
                if sent is not None:
                    sent.wait_for_sends()

    def _run_group(self, number: int, source: Tensor, first: int | None, beam_search: Search | None) -> Iterator[bool]:
        outputs, caches = self._begin(number, source, first)
        sentences, hypotheses = len(source), 1
        while True:
            if beam_search is not None:
                update = beam_search.advance(outputs[0])
                for stage in self._decoding_stages:
                    stage.send((update.kept, update.parents, update.tokens))
            yield True
            if beam_search is None:
                assert self._choice_channel is not None
                update = BeamUpdate(*self._choice_channel.recv(f"the choice for group {number}"))
            if update.finished:
                return
            update.apply(caches, sentences, hypotheses, self._device)
            sentences, hypotheses = update.tokens.shape
            outputs = self._extend(number, caches, update)

    def _begin(self, number: int, source: Tensor, first: int | None) -> tuple[Tensors, list[LayerCache]]:
        if self._previous_stage is None:
            source = source.to(self._device, non_blocking=True)
            inputs: Tensors = (source,) if first is None else (source, source.new_full((len(source), 1), first))
        else:
            inputs = self._previous_stage.recv(f"the prefill of group {number}")
        outputs, caches = self._part.prefill(inputs)
        if self._next_stage is not None:
            self._next_stage.send(outputs)
        return outputs, caches

    def _extend(self, number: int, caches: list[LayerCache], update: BeamUpdate) -> Tensors:
        if self._coord.stage == self._entry:
            inputs: Tensors = (update.tokens.view(-1, 1).to(self._device, non_blocking=True),)
        else:
            assert self._previous_stage is not None
            inputs = self._previous_stage.recv(f"the next token of group {number}")
        outputs = self._part.decode_step(caches, inputs)
        if self._next_stage is not None:
            self._next_stage.send(outputs)
        return outputs
