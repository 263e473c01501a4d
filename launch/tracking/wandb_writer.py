"""Adds results to a run's wandb run after its workers have ended. A program, started by ``wandb_finish``.

python -m launch.tracking.wandb_writer runs/<name>/<id> end offline       plan, experiment, plot of a step
python -m launch.tracking.wandb_writer runs/<name>/<id> scores offline    score tables by language, direction and third

It reads only the run's folder, and imports little, because each run waits for it at its end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.runs.store import RunFolder
from suite.paths import hide_secrets
from suite.training.metrics import STEP
from suite.training.wandb_run import Identity, open_run


def _add_end(run: RunFolder, wandb_run: Any) -> None:
    import wandb

    steps = json.loads(run.record.read_text())["steps"]
    if run.timeline.exists():
        wandb_run.log({STEP: steps, "pipeline/timeline": wandb.Image(str(run.timeline))})
    for kind, files in {
        "plan": (run.plan_text, run.plan_json, run.experiment),
        "timeline": (run.timeline, run.perfetto),
    }.items():
        artifact = wandb.Artifact(f"{kind}-{wandb_run.id}", type=kind)
        existing = [file for file in files if file.exists()]
        for file in existing:
            if file == run.experiment:
                with artifact.new_file(file.name) as copy:
                    copy.write(hide_secrets(file.read_text()))
            else:
                artifact.add_file(str(file))
        if existing:
            wandb_run.log_artifact(artifact)


def _add_scores(run: RunFolder, wandb_run: Any) -> None:
    import wandb

    record = json.loads(run.scores.read_text())
    rows = list(score_rows(record))
    macro = record["macro"]
    thirds = [[measure, *means.values()] for measure, means in macro.items()]
    wandb_run.log(
        {
            STEP: record["step"],
            "scores/languages": wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows]),
            "scores/thirds": wandb.Table(columns=["measure", *macro["bleu"]], data=thirds),
            **{f"scores/{measure}": means["all"] for measure, means in macro.items()},
        }
    )


def score_rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each language and direction of a run's ``scores.json``."""
    for direction, scores in record["directions"].items():
        source, _, target = direction.partition("-")
        language = target if target in record["thirds"] else source
        yield {
            "language": language, "direction": direction, "third": record["thirds"][language], "pairs": scores["pairs"],
            "train_pairs": scores["train_pairs"], "BLEU": scores["bleu"], "chrF": scores["chrf"],
            "BLEU signature": record["signatures"]["bleu"], "chrF signature": record["signatures"]["chrf"],
        }  # fmt: skip


def main(folder: str, what: str, mode: str) -> None:
    """Adds the results ``what``; exits with a message if that fails."""
    run = RunFolder(Path(folder))
    identity = Identity.read(run.path)
    if identity is None:
        sys.exit(f"{folder} has no wandb run")
    # staging folder of artifacts, by default in the home directory
    os.environ.setdefault("WANDB_DATA_DIR", str(run.path / "wandb" / "data"))
    try:
        wandb_run = open_run(run.path, mode, identity)
        {"end": _add_end, "scores": _add_scores}[what](run, wandb_run)
        wandb_run.finish()
    except Exception as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
