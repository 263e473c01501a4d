"""Decodes on the stand-in: beam search, forced decoding and sampling, on one stage and on the last of two."""

from collections import Counter

import torch

from models.language_model import LanguageModelShape
from models.language_model import layers as language_model_layers
from suite.decoding import decode as decoding
from suite.decoding.beam import Beam
from suite.decoding.forced import ForcedDecoding
from suite.decoding.kv_cache import CachedLayers, first_cached_layer
from suite.decoding.sampling import Sampler
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.runtime.stage import Stage
from tests.lane import works
from tests.lane.distributed import worker
from tests.lane.mode import StandinMode
from tests.lane.standin import DEVICE

BEGIN, END = 2, 3


def decode():
    """Returns the waits of all three."""
    translation = works.packed_text().layers
    with torch.device("meta"):
        language = language_model_layers(LanguageModelShape(2, 16, 24, 2, 40, 32))
    waits = Counter()
    for precision in ("fp32", "bf16"):
        waits += decode_on_one_stage(translation, precision, BEGIN, lambda: Beam([3, 3], 3, END))
    waits += decode_on_one_stage(translation, "fp32", BEGIN, lambda: ForcedDecoding([[5, END], [6, 7, END]]))
    waits += decode_on_one_stage(language, "fp32", None, lambda: Sampler([2, 2], END, 0.8, 5, [1, 2]))
    return waits + decode_on_last_stage(translation)


def decode_on_one_stage(layers, precision, first, search):
    """Decodes a group of two on a stage that has the whole model."""
    with worker(0, 1):
        return _run(layers, range(len(layers)), RankCoord(0, 1, 1), precision, first, search)


def decode_on_last_stage(layers):
    """Decodes on the last of two stages; what it would receive has the shapes that the first stage sends."""
    prefill = (torch.float32, (2, 1, 16)), (torch.float32, (2, 4, 16)), (torch.int32, (2, 5))

    def recv(channel, what):
        specs = prefill if "prefill" in what else [(torch.float32, (6, 1, 16))]
        return tuple(torch.empty(shape, dtype=dtype, device=DEVICE) for dtype, shape in specs)

    original, decoding.TensorChannel.recv = decoding.TensorChannel.recv, recv
    try:
        with worker(1, 2):
            return _run(layers, range(3, len(layers)), RankCoord(1, 2, 1), "fp32", BEGIN, lambda: Beam([3, 3], 3, END))
    finally:
        decoding.TensorChannel.recv = original


def _run(layers, cell, coord, precision, first, search):
    mode = StandinMode()
    with mode:
        stage = Stage(layers, [cell], None, DEVICE, precision, 0)
        entry_layer = first_cached_layer(layers)
        part = CachedLayers(list(stage.layers), cell.start, entry_layer, DEVICE, precision == "bf16")
        entry = 0
        groups = make_groups(coord, 60) if coord.stages > 1 else None
        decoder = decoding.Decoder(coord, part, entry, groups, DEVICE)
        source, done, counted = torch.tensor([[5, 6, 7, END], [8, 9, 10, END]]), [], Counted(search())
        mode.waits.clear()
        decoder.run([source], first, lambda number: counted, done.append)
    assert done == [0]
    if not isinstance(counted.search, ForcedDecoding):  # a fake tensor lists its values one by one
        assert mode.waits.total() == counted.tokens, f"not one wait a token: {mode.waits}"
    return mode.waits


class Counted:
    """A search that counts how often it chose a token."""

    def __init__(self, search):
        self.search, self.tokens = search, 0

    def advance(self, logits):
        self.tokens += 1
        return self.search.advance(logits)
