"""Every entrant computes, in real processes, the gradients of one process with the whole model."""

import io

import pytest
import torch
from rich.console import Console
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from models.shape import TransformerShape
from suite.pipeline.model.layers import as_tuple
from suite.pipeline.planning.costs import LayerCost
from tests.bench import bench
from tests.bench.cases import Case
from tests.bench.entrants import ENTRANTS
from tests.bench.peers.cell import Cell
from tests.bench.peers.torch_pipelining import REFUSED_BY_SPLIT_BACKWARD
from tests.bench.peers.workload import SyntheticWork, TranslationWork
from tests.bench.results import TOLERANCE

SLEEPERS = SyntheticWork(3, 6, forward_s=0.0, shape=(2, 3, 4))
REPLICAS = SyntheticWork(2, 2, replicas=2, forward_s=0.0, parameters=300, shape=(2, 3, 4))
SENTENCES = TranslationWork(2, 4, model=TransformerShape(2, 32, 64, 1, 50, dropout=0.0), shape=(2, 8))


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("work", [SLEEPERS, REPLICAS, SENTENCES], ids=["sleeping", "replicas", "translation"])
def test_all_entrants_have_the_gradients_of_one_process(work):
    layers, _ = work.build()
    costs = [LayerCost(1.0, 1.0, 2.0, 0.0, 1, 8, 8, 8, 8, 8, 8, 8)] * len(layers)  # decide only cells and limit
    result = bench.run(Case(work, steps=1, rounds=2), ENTRANTS, Console(file=io.StringIO()), costs)
    scores = {score.entrant: score for score in result.scores}
    assert set(scores) == {entrant.name for entrant in ENTRANTS if work.name in (entrant.workloads or [work.name])}
    for entrant in ENTRANTS:
        if entrant.name not in scores:
            continue
        score, reason = scores[entrant.name], entrant.refused.get(work.name)
        assert bool(score.rounds) == (reason is None), score
        if reason is not None:
            assert reason in score.remark
            continue
        assert score.difference <= TOLERANCE, score
        assert list(map(len, score.rounds)) == [1, 1]
        assert score.peak_bytes > 0
    assert result.wrong == []


def test_why_zero_bubble_has_no_row_for_translation():
    """When this fails, PyTorch has fixed its split backward: remove ``REFUSED_BY_SPLIT_BACKWARD``."""
    layers, _ = SENTENCES.build()
    cell = Cell(layers, range(2, 4))  # the encoder's last layer, then the target's embedding
    x, visible = torch.randn(2, 8, 32, requires_grad=True), torch.ones(2, 8, dtype=torch.bool)
    inputs = [x, visible, torch.randint(0, 50, (2, 8))]

    def backward(split):
        cell.zero_grad()
        outputs = list(as_tuple(cell(*inputs)))
        ones = [torch.ones_like(output) if output.is_floating_point() else None for output in outputs]
        if split:
            _, groups = stage_backward_input(tuple(outputs), ones, inputs, cell.parameters())
            stage_backward_weight(cell.parameters(), groups)
        else:
            torch.autograd.backward(outputs[:2], ones[:2])
        return {key: gradient.clone() for key, gradient in cell.gradients().items()}

    whole, split = backward(False), backward(True)
    lost = [key for key in whole if not torch.allclose(whole[key], split[key], atol=1e-5)]
    assert lost == [(3, "weight")]
    assert "embedding" in REFUSED_BY_SPLIT_BACKWARD[SENTENCES.name]
