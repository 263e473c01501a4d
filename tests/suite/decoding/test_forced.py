"""Forced decoding: the NLL of known outputs, as the whole forward computes it."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from launch.inference.decoding_methods import ForcedScoring
from suite.decoding.decode import Decoder
from suite.decoding.forced import ForcedDecoding
from suite.decoding.kv_cache import CachedLayers, first_cached_layer
from suite.errors import NonFiniteError
from suite.pipeline.model.topology import RankCoord
from tests.suite.decoding.test_decode import BEGIN, END, PADDING, model, sentences, whole_forward
from tests.suite.pipeline.build import CPU


def test_the_nll_is_that_of_the_whole_forward():
    sources = sentences()
    targets = [[*reversed(source), *source[:2], END] for source in sources]
    method, made = ForcedScoring(targets), model()
    decoder = Decoder(
        RankCoord(0, 1, 1), CachedLayers(made, 0, first_cached_layer(made), CPU, mixed=False), 0, None, CPU
    )
    groups = method.groups(sources)
    searches = [method.search(group) for group in groups]
    rows = [pad_sequence([torch.tensor(sources[at]) for at in group], batch_first=True, padding_value=PADDING)
            for group in groups]  # fmt: skip
    decoder.run(rows, method.first, searches.__getitem__, lambda number: None)
    found = {at: nll for group, search in zip(groups, searches, strict=True)
             for at, nll in zip(group, search.results, strict=True)}  # fmt: skip
    assert len({len(nll) for nll in found.values()}) > 3
    for at, (source, target) in enumerate(zip(sources, targets, strict=True)):
        logits = whole_forward(made, source, [BEGIN, *target[:-1]])
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="none").tolist()
        assert found[at] == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(NonFiniteError, match="not all finite"):
        ForcedDecoding([[END]]).advance(torch.tensor([[0.0, torch.inf, 0.0, 0.0]]))
