"""A corpus that leaves nothing to validate on is refused when the run is planned."""

from experiments.registry import find
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.splitting import TRAIN, VALID
from tests.suite.data.mutations import PAIRS
from tests.suite.data.text.pair_files import write_pairs


def test_a_corpus_too_small_for_a_validation_split_is_named(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    write_pairs(texts, "train", PAIRS[:6])
    experiment = find("t24_1_3b_wide").with_settings(
        f"text.corpus={texts} text.clean=false text.vocabulary=340 text.max_length=32"
    )
    data = prepare(experiment.text, tmp_path, lambda _: None)
    assert (sum(data.sizes[TRAIN]), sum(data.sizes[VALID])) == (6, 0)
    (error,) = experiment.with_prepared(folder_of(experiment.text, tmp_path)).trial_errors()
    assert error.startswith(f"{texts} has no validation pairs; add a validation file to it")
