"""What finished members leave: scored translations of which a given share of the words is right, and their records."""

import json
import random
from pathlib import Path

from experiments.sweeps.registry import SWEEPS
from tests.experiments.planning.works import LAPTOP

WORDS = ["open", "the", "file", "save", "all", "changes", "now", "please", "close", "window"]


def write_record(folder: Path, losses: list[dict], **more) -> None:
    """Writes ``record.json`` and the lines of ``metrics.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": "t12_400m", "data": "catalogues", "K": 1, "parameters": 445_104, "seconds": 2.0,
        "tokens_per_second": 5120.0, "loss_last": 3.5, "shrunk": ["model.width 1 -> 2"], **more,
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))


def write_scores(folder: Path, directions: dict[str, dict], right: float, **more) -> None:
    """Writes ``scores.json`` and the lines of ``directions``: their training pairs, NLL, BLEU and chrF by name."""
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    chance, records = random.Random(f"{folder.parent.name}/{folder.name}"), {}  # the same wherever the test runs
    for name, scores in directions.items():
        references = [" ".join(random.Random(f"{name}{at}").choices(WORDS, k=6)) for at in range(40)]
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


THIRDS = {"de": "high", "es": "high", "it": "middle", "nl": "middle", "da": "low", "gl": "low"}
PAIRS = {"de": 17_000, "es": 18_000, "it": 3000, "nl": 3000, "da": 500, "gl": 500}
GOOD = {"t12_400m": 10.0, "t24_1_3b_wide": 12.0, "t48_1_3b_deep": 15.0, "t64_3b": 17.0, "t128_6b": 19.0}


def finish(runs: Path, member, bleu):
    """Leaves what a member leaves when it is trained and scored; ``bleu`` is of its languages' two directions. The
    other scores follow from it."""
    folder = runs / member.folder
    experiment, steps = member.experiment, member.experiment.train.steps
    lines = [{"step": at + 1, "train/tokens": 1024 * (at + 1), "train/loss": 7 - at / 3} for at in range(10)]
    best = {"best_step": steps, "best_valid_nll": 8 - bleu / 5, "valid_nll": 3.0}
    lines.append({"step": 10, "valid/nll": 3.0})
    write_record(folder, lines, name=experiment.name, steps=steps, tokens=10_240, **best)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    languages = experiment.text.languages or experiment.text.corpus_languages
    directions = {
        way: {"train_pairs": PAIRS[code], "bleu": share * bleu, "chrf": 2 * share * bleu, "nll": 8 - share * bleu / 5}
        for code in languages
        for way, share in ((f"en-{code}", 0.9), (f"{code}-en", 1.1))
    }
    thirds = {code: THIRDS[code] for code in languages}
    if member.scoring is not None:
        write_scores(folder, directions, bleu / 25, step=experiment.train.steps, max_pairs=300, thirds=thirds)


def members(name, runs=Path("runs")):
    return SWEEPS[name].members("laptop", LAPTOP, runs)


def depth_width(runs: Path, good, alone=6.0, noise=0.1, leave_out=()):
    for member in members("depth_width"):
        if member.label not in leave_out:
            finish(runs, member, good[member.label] + noise * member.experiment.train.seed)
    for _ in range(2):  # tuning, then the tuned ones
        for member in members("bilingual", runs):
            if member.label.startswith("bilingual") and member.label not in leave_out:
                better = 0 if member.scoring is not None or "half-the-size" in member.folder else -1
                finish(runs, member, max(0.0, alone + better + noise * member.experiment.train.seed))


def words(runs: Path, name="depth_width"):
    table = SWEEPS[name].report("laptop", LAPTOP, runs).tables[0]
    return {row[0].partition(": ")[0]: row[2] for row in table.rows if row[0]}, table
