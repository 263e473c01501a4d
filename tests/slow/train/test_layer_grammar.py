"""Two thousand models out of odd layers, and each production of the grammar alone."""

import pytest

from tests.experiments.custom.grammar import PRODUCTIONS, draw
from tests.experiments.custom.grammar_run import outcomes

COUNT, AT_ONCE = 2000, 250


@pytest.mark.parametrize("first", range(0, COUNT, AT_ONCE))
def test_models_train_as_plain_pytorch_or_are_refused_in_one_sentence(first):
    found = outcomes([f"{draw.__name__}:seed_{seed}" for seed in range(first, first + AT_ONCE)])
    assert not {source: said for source, said in found.items() if said.split(":")[0] not in ("trained", "refused")}


def test_each_production_alone_trains_or_is_refused_as_it_says():
    sources = {name: f"{draw.__name__}:alone_{name}" for name in PRODUCTIONS}
    found = outcomes(list(sources.values()))
    told = {name: found[source] for name, source in sources.items()}
    assert not {name: said for name, said in told.items() if not PRODUCTIONS[name].expects(said)}
