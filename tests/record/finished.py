"""Made-up records of finished members of sweeps: numbers that depend on the member's name alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = ("open", "the", "file", "save", "all", "changes", "now", "please", "close", "window")

LANGUAGES = {"de": "high", "es": "high", "it": "middle", "nl": "middle", "da": "low", "gl": "low"}
"""With their third, of members that have all languages."""

PAIRS = {"high": 17_000, "middle": 3000, "low": 500}

LINES = 80


def finish_all(runs: Path, members: Iterable[tuple[str, str, dict[str, Any], Any]]) -> None:
    """Writes what each member (folder, label, settings, scoring) leaves when it is trained and scored."""
    for name, label, settings, scoring in members:
        folder = runs / name
        folder.mkdir(parents=True, exist_ok=True)
        quality = random.Random(label).uniform(0.2, 0.9) + random.Random(name).uniform(-0.02, 0.02)
        write_training(folder, settings, quality)
        if scoring is not None:
            write_scores(folder, settings, scoring, quality)


def languages_of(settings: dict[str, Any]) -> dict[str, str]:
    """Returns the languages of a member with their thirds."""
    text = settings.get("text", {})
    codes = text.get("languages") or text.get("corpus_languages") or list(LANGUAGES)
    return {code: LANGUAGES.get(code, ("high", "middle", "low")[at % 3]) for at, code in enumerate(sorted(codes))}


def write_training(folder: Path, settings: dict[str, Any], quality: float) -> None:
    steps, nll = settings["train"]["steps"], 8 - 5 * quality
    record = {
        "name": settings["name"], "data": "catalogues", "K": 1, "parameters": 445_104, "steps": steps,
        "best_step": steps, "tokens": 1024 * steps, "seconds": 2.0, "tokens_per_second": 5120.0, "loss_last": nll + 0.5,
        "valid_nll": nll, "best_valid_nll": nll, "valid_accuracy": quality, "counts": {"train": 5000, "test": 500},
        "shrunk": ["model.width 2 -> 1"],
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))
    lines = []
    for at in range(1, 11):
        done = {"step": max(1, steps * at // 10), "train/tokens": 1024 * steps * at // 10}
        lines.append(done | {"train/loss": nll + 3 / at, "train/grad_norm": 2 / at, "train/applied": float(at != 3)})
        by_language = {f"valid/nll/{code}": nll + 1 / at for code in languages_of(settings)}
        lines.append({"step": done["step"], "valid/nll": nll + 1 / at, **by_language})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers = 2 * settings["model"].get("blocks_per_stack", 1) + 3
    statistics = [
        {"step": step} | {name: [quality + at / 10 for at in range(layers)] for name in STATISTICS} for step in (1, 10)
    ]
    (folder / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in statistics))


STATISTICS = ("norms", "kurtosis", "output_rms", "change_rms")


def write_scores(folder: Path, settings: dict[str, Any], scoring: dict[str, Any], quality: float) -> None:
    """Writes the scores of both directions of each language, and translations of which so many words are right."""
    (folder / "scores").mkdir(exist_ok=True)
    chance, directions, thirds = random.Random(str(folder.name)), {}, languages_of(settings)
    thirds = {code: thirds[code] for code in scoring["languages"] or thirds}
    for code, third in thirds.items():
        for name, share in ((f"en-{code}", 0.9), (f"{code}-en", 1.1)):
            references = [" ".join(random.Random(f"{name}{at}").choices(WORDS, k=6)) for at in range(LINES)]
            written = [
                " ".join(word if chance.random() < quality else "x" for word in line.split()) for line in references
            ]
            for kind, texts in (("hyp", written), ("ref", references)):
                (folder / "scores" / f"{name}.{kind}").write_text("".join(f"{text}\n" for text in texts))
            whole = {"nll": 8 - 5 * share * quality, "bleu": 40 * share * quality, "chrf": 70 * share * quality}
            directions[name] = {"train_pairs": PAIRS[third], **part(whole, 0), "plain": part(whole, 1)}
    record = {
        "split": "test", "step": settings["train"]["steps"], "beam": scoring["beam"],
        "max_pairs": scoring["max_pairs"], "length_penalty": 0.6, "seconds": 3.0, "sentences_per_second": 40.0,
        "signatures": {"bleu": "nrefs:1|case:mixed", "chrf": "nrefs:1"}, "directions": directions, "thirds": thirds,
    }  # fmt: skip
    (folder / "scores.json").write_text(json.dumps(record))


def part(scores: dict[str, float], less: float) -> dict[str, Any]:
    """Returns the scores of a part of the pairs, a little worse than those of all."""
    worse = {"nll": scores["nll"] * (1 + less / 10)}
    worse |= {name: scores[name] * (1 - less / 20) for name in ("bleu", "chrf")}
    return {"pairs": 300, "copy": {"bleu": 14.0 - less, "chrf": 26.0 - less}} | worse
