"""A corpus that leaves nothing to validate on is refused when the run is planned."""

from experiments.registry import find
from suite.data.text.prepare import folder_of, prepare
from suite.data.text.splitting import TRAIN, VALID

PAIRS = {
    "de": ("Das Buch liegt auf dem Tisch.", "Morgen fahren wir zum Bahnhof.", "Der Hund schläft unter dem alten Baum.",
           "Sie kauft frisches Brot und Käse.", "Im Winter friert der kleine See.", "Wer hat den Schlüssel gesehen?"),
    "en": ("The book lies on the table.", "Tomorrow we drive to the station.", "The dog sleeps under the old tree.",
           "She buys fresh bread and cheese.", "In winter the small lake freezes.", "Who has seen the key?"),
}  # fmt: skip


def test_a_corpus_too_small_for_a_validation_split_is_named(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for language, lines in PAIRS.items():
        (texts / f"train.de-en.{language}").write_text("\n".join(lines) + "\n")
    experiment = find("t24_1_3b_wide").with_settings(
        f"text.corpus={texts} text.clean=false text.vocabulary=340 text.max_length=32"
    )
    data = prepare(experiment.text, tmp_path, lambda _: None)
    assert (sum(data.sizes[TRAIN]), sum(data.sizes[VALID])) == (6, 0)
    (error,) = experiment.with_prepared(folder_of(experiment.text, tmp_path)).trial_errors()
    assert error.startswith(f"{texts} has no validation pairs; add a validation file to it")
