"""Every peer computes, in real processes, the gradients of one process that has the whole model; ours do too."""

import importlib.util
import io

import pytest
import torch
from rich.console import Console
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from experiments.benchmark.cases import TOLERANCE, Case
from experiments.benchmark.peers.cell import Cell
from experiments.benchmark.peers.roster import PEERS
from experiments.benchmark.peers.torch_pipelining import refuse_split
from experiments.benchmark.peers.work import Sentences, Sleepers
from launch.benchmarks import peers as bench
from launch.benchmarks.entrants import ENTRANTS
from suite.pipeline.model.layers import as_tuple
from suite.pipeline.planning.costs import LayerCost

SLEEPERS = Sleepers(3, 6, forward_s=0.0, shape=(2, 3, 4))
REPLICAS = Sleepers(2, 2, replicas=2, forward_s=0.0, parameters=300, shape=(2, 3, 4))
SENTENCES = Sentences(2, 4, layers=2, width=32, feed_forward=64, heads=1, vocabulary=50, time=8, each=2)


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("work", [SLEEPERS, REPLICAS, SENTENCES], ids=["sleeping", "replicas", "translation"])
def test_all_contenders_have_the_gradients_of_one_process(work):
    layers, _ = work.build()
    costs = [LayerCost(1.0, 1.0, 2.0, 0.0, 1, 8, 8, 8, 8, 8, 8, 8)] * len(layers)  # they decide cells and limit alone
    found = bench.run(Case(work, rounds=1), ENTRANTS, Console(file=io.StringIO()), costs)
    scores = {score.entrant: score for score in found.scores}
    assert set(scores) == {one.name for one in ENTRANTS if not one.works or work.name in one.works}
    for entrant in ENTRANTS:
        if entrant.name not in scores:
            continue
        score, reason = scores[entrant.name], entrant.refuse(work)
        assert score.ran == (reason is None), score
        if reason is not None:
            assert reason in score.remark
            continue
        assert score.difference <= TOLERANCE, score
        assert not score.wrong
        assert [len(steps) for steps in score.rounds] == [1]
        assert (score.peak is not None) == entrant.peak
    assert found.wrong == []


def test_the_peers_are_these_with_rebuild_and_without():
    kinds = {(peer.name.partition(",")[0], peer.recomputes) for peer in PEERS if peer.name.partition(",")[0]}
    for name in ("torch GPipe", "torch 1F1B", "torch interleaved 1F1B", "DeepSpeed 1F1B", "torchgpipe"):
        assert {(name, True), (name, False)} <= kinds
    assert ("torch interleaved zero-bubble", False) in kinds
    assert ("torch ZBV zero-bubble", False) in kinds


def test_torchgpipe_says_when_it_is_not_installed(monkeypatch):
    torchgpipe = next(peer for peer in PEERS if peer.name == "torchgpipe")
    if importlib.util.find_spec("torchgpipe") is None:
        assert "pip install" in torchgpipe.refuse(SLEEPERS)
    else:
        assert torchgpipe.refuse(SLEEPERS) is None
        assert "no replicas" in torchgpipe.refuse(REPLICAS)


def test_why_zero_bubble_has_no_row_for_translation():
    """When this fails, PyTorch has mended its split backward: take ``refuse_split`` away."""
    layers, _ = SENTENCES.build()
    cell = Cell(layers, range(2, 4))  # the encoder's last layer, then the target's embedding
    x, visible = torch.randn(2, 8, 32, requires_grad=True), torch.ones(2, 8, dtype=torch.bool)
    inputs = [x, visible, torch.randint(0, 50, (2, 8))]

    def backward(split):
        cell.clear()
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
    assert "embedding" in refuse_split(SENTENCES)
    assert refuse_split(SLEEPERS) is None
