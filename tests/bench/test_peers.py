"""Every entrant computes, in real processes, the gradients of one process with the whole model."""

import io

import pytest
from rich.console import Console

from models.shape import TransformerShape
from suite.pipeline.planning.costs import LayerCost
from tests.bench import bench
from tests.bench.cases import Case
from tests.bench.entrants import ENTRANTS
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
