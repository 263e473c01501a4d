"""Writing through a pipeline: the same tokens at every K, with however many groups, and no wait without end."""

import time

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from launch.backends.processes import run_processes
from models.transformer import TransformerShape, layers
from suite.decoding.beam import Beam
from suite.decoding.decode import Decoder
from suite.decoding.grouping import group_by_length
from suite.decoding.kv_cache import CachedLayers, first_cached_layer
from suite.errors import StallError
from suite.pipeline.model.topology import RankCoord, make_groups
from suite.pipeline.planning.partition import cell_ranges
from tests.models.test_transformer import run
from tests.suite.pipeline.build import CPU, join, whole

BEGIN, END, PADDING = 2, 3, 0


def model():
    with torch.device("meta"):
        made = layers(TransformerShape(2, 16, 24, 2, 30, head_width=8, dropout=0.1))
    made = whole(made, seed=3)
    generator = torch.Generator().manual_seed(0)
    for layer in made:
        for name, parameter in layer.named_parameters():
            if parameter.ndim == 2:  # decided tokens, of which the source is the cause
                std = 1.0 if name == "source.outward.weight" else 0.3
                torch.nn.init.normal_(parameter, std=std, generator=generator)
    with torch.no_grad():
        made[-1].project.bias.zero_()[END] = 2.0
    return made


def sentences(count=14):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [torch.randint(4, 30, (length,), generator=generator).tolist() for length in lengths]


def limit(source):
    return 3 + len(source)


def write(rank, world, rendezvous, cells, at_once, sizes=(1, 3), late=None):
    """Returns the tokens of all sentences by size of the beam, in groups of ``at_once``; of the last stage."""
    join(rank, world, rendezvous)
    return {size: write_with(RankCoord(rank, world, 1), cells, at_once, size, late) for size in sizes}


def write_with(coord, cells, at_once, size, late):
    made, sources, rank, world = model(), sentences(), coord.rank, coord.stages
    first, cells = first_cached_layer(made), cell_ranges(cells, len(made))
    part = CachedLayers([made[at] for at in cells[rank]], cells[rank].start, first, CPU, mixed=False)
    holder = next(k for k, cell in enumerate(cells) if first in cell)
    decoder = Decoder(coord, part, holder, make_groups(coord, 60) if world > 1 else None, CPU)
    if late == rank:
        time.sleep(5)
    order = [at for group in group_by_length(sources, 1) for at in group]
    groups = [order[start : start + at_once] for start in range(0, len(order), at_once)]
    beams = [Beam([limit(sources[at]) for at in group], size, END) for group in groups]
    done = []
    rows = [pad_sequence([torch.tensor(sources[at]) for at in group], batch_first=True, padding_value=PADDING)
            for group in groups]  # fmt: skip
    decoder.run(rows, BEGIN, beams.__getitem__, done.append)
    if not coord.has_loss:
        return None
    assert sorted(done) == list(range(len(groups)))
    tokens = {at: result for group, beam in zip(groups, beams, strict=True)
              for at, result in zip(group, beam.results, strict=True)}  # fmt: skip
    return [tokens[at] for at in range(len(sources))]


@pytest.fixture(scope="module")
def alone():
    return run_processes(write, 1, (7,), 5)[-1]


# the entry is layer 3: in the middle of a stage, at the head of one, and on a stage of its own
@pytest.mark.parametrize("cells", [(5, 2), (3, 4), (3, 1, 3)], ids=str)
def test_tokens_are_the_same_at_every_k(cells, alone):
    assert run_processes(write, len(cells), cells, 5)[-1] == alone


def test_what_is_written_ends_and_differs(alone):
    """Or the tests above would compare nothing."""
    assert len({tuple(tokens) for tokens in alone[1]}) > 7
    assert len({len(tokens) for tokens in alone[1]}) > 3
    assert alone[1] != alone[3]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 14])
def test_company_and_padding_change_no_token(at_once, alone):
    assert run_processes(write, 2, (4, 3), at_once)[-1] == alone


def hurried(*arguments):
    """As ``write``, with little patience."""
    import suite.decoding.decode

    suite.decoding.decode.DECODE_TIMEOUT_S = 1.0
    return write(*arguments)


@pytest.mark.parametrize(("late", "message"), [(0, "group 0 from stage 0"), (1, "stage [01]")])
def test_a_stage_that_is_waited_for_too_long_is_named(late, message):
    with pytest.raises(StallError, match=f"waited 1 s for .*{message}"):
        run_processes(hurried, 2, (5, 2), 5, (1,), late)


def whole_forward(made, source, text):
    """Returns the logits of each token's successor."""
    return run([layer.eval() for layer in made], torch.tensor([source]), torch.tensor([text]))[0]


def greedy(made, source):
    text = [BEGIN]
    while len(text) <= limit(source) and END not in text:
        text.append(int(whole_forward(made, source, text)[-1].argmax()))
    return [token for token in text[1:] if token != END]


def test_greedy_is_the_whole_forward_again_and_again(alone):
    made = model()
    assert alone[1] == [greedy(made, source) for source in sentences()]
