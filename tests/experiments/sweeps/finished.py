"""What a scored member leaves: translations of which a given share of the words is right, and their scores."""

import json
import random
from pathlib import Path

WORDS = ["open", "the", "file", "save", "all", "changes", "now", "please", "close", "window"]


def write_scores(folder: Path, directions: dict[str, dict], right: float, **more) -> None:
    """Writes ``scores.json`` and the lines of ``directions``: their training pairs, NLL, BLEU and chrF by name."""
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    chance, records = random.Random(f"{folder.parent.name}/{folder.name}"), {}  # the same wherever the test runs
    for name, scores in directions.items():
        references = [" ".join(random.Random(f"{name}{at}").choices(WORDS, k=6)) for at in range(80)]
        written = [" ".join(word if chance.random() < right else "x" for word in line.split()) for line in references]
        for kind, texts in (("hyp", written), ("ref", references)):
            (folder / "scores" / f"{name}.{kind}").write_text("".join(f"{text}\n" for text in texts))
        records[name] = {**scores, **_part(scores, 0), "plain": _part(scores, 1)}
    record = {
        "split": "test", "beam": 4, "length_penalty": 0.6, "seconds": 3.0, "sentences_per_second": 40.0,
        "signatures": {"bleu": "nrefs:1|case:mixed", "chrf": "nrefs:1"}, "directions": records,
        **more,
    }  # fmt: skip
    (folder / "scores.json").write_text(json.dumps(record))


def _part(scores: dict, less: float) -> dict:
    """The scores of a part of the pairs: 1 - ``less`` / 20 times those of all, and 1 + ``less`` / 10 times the NLL."""
    own = {"nll": scores["nll"] * (1 + less / 10)} | {name: scores[name] * (1 - less / 20) for name in ("bleu", "chrf")}
    return {"pairs": 300, "copy": {"bleu": 14.0 - less, "chrf": 26.0 - less}} | own
