"""An example of every command, run as a user does: ``python -m tests.slow.commands`` writes docs/results/commands.md.

All run in one folder, so later ones use the runs of earlier ones, and the jobs of a Ray head on this machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.launch.command_line import ROOT, command
from tests.slow.__main__ import described
from tests.slow.jobs_head import running_head

SMALL = (
    "text.corpus=django text.vocabulary=600 text.max_length=24 model.blocks_per_stack=2 model.width=16 model.heads=2 "
    "model.feed_forward=32 train.batch_tokens=120 train.valid_pairs=8 train.steps=4 train.checkpoint_every=2 "
    "tracking.wandb=offline pipeline.stages=2 pipeline.micro_batches=2"
)
SMALL_LM = (
    "text.corpus=django text.vocabulary=300 text.length=16 model.blocks_per_stack=2 model.width=16 model.heads=2 "
    "model.feed_forward=32 train.batch_sequences=4 train.steps=4"
)


class Example(NamedTuple):
    name: str
    arguments: tuple[str, ...] = ()
    """``RUN``, ``LM`` and ``ADDRESS`` stand for a run of translation, one of a language model, and the head."""
    says: str = ""
    """What it prints, among other things."""
    code: int = 0


EXAMPLES = [
    Example("list", says="t128_6b"),
    Example("settings", ("t12_400m",), "pipeline.micro_batches"),
    Example("plan", ("t128_6b", "--cluster", "128xH100"), "tokens/s"),
    Example("experiment", ("t12_400m", "--scale", "laptop", "--set", SMALL), "step 4/4"),
    Example("runs", says="t12_400m"),
    Example("table", ("breakdown", "--run", "RUN"), "forward"),
    Example("checkpoints", ("RUN",), "valid"),
    Example("resume", ("RUN", "--set", "train.steps=6 pipeline.stages=1"), "step 6/6"),
    Example("report", ("--run", "RUN"), "report.html"),
    Example("score", ("RUN", "--set", "score.beam=1 score.max_pairs=2"), "BLEU"),
    Example("translate", ("RUN", "The file was saved.", "--to", "de")),
    Example("export", ("RUN",), "export"),
    Example("sync", ("RUN",), "WANDB_API_KEY", 2),
    Example("experiment", ("transformer_13", "--scale", "laptop", "--set", SMALL_LM), "step 4/4"),
    Example("generate", ("LM", "The file", "--tokens", "4")),
    Example("check", ("digits.py:digits", "--steps", "1"), "same training as plain PyTorch"),
    Example("diff", ("digits.py:digits", "--a", "plain", "--b", "pipeline.stages=2"), "tensors"),
    Example("sweep", says="depth_width"),
    Example("doctor", ("--address", "ADDRESS", "--storage", "storage"), "ok"),
    Example(
        "submit",
        ("t12_400m", "--address", "ADDRESS", "--storage", "storage", "--job", "first", "--scale", "laptop",
         "--set", SMALL),
        "job first is done",
    ),
]  # fmt: skip


def outcomes(folder: Path) -> Iterator[tuple[Example, float, int, str]]:
    """Runs the examples in a folder; yields each with its seconds, its exit code and what it printed."""
    (folder / "digits.py").write_text((ROOT / "examples/digits.py").read_text())
    with running_head(folder) as head:
        for example in EXAMPLES:
            values = {"ADDRESS": head.address, "storage": str(head.storage)}
            for name, experiment in (("RUN", "t12_400m"), ("LM", "transformer_13")):
                if found := sorted(folder.glob(f"runs/{experiment}/*")):
                    values[name] = f"{experiment}/{found[0].name}"
            began = time.monotonic()
            done = subprocess.run(
                command(example.name, *(values.get(each, each) for each in example.arguments)), cwd=folder,
                env=head.variables(WANDB_API_KEY=None), capture_output=True, text=True, timeout=600, check=False,
            )  # fmt: skip
            yield example, time.monotonic() - began, done.returncode, done.stdout + done.stderr


def main() -> int:
    """Returns 1, and writes nothing, if an example fails."""
    rows, all_right = [], True
    with tempfile.TemporaryDirectory() as folder:
        for example, seconds, code, printed in outcomes(Path(folder)):
            given = " ".join(f'"{each}"' if " " in each else each for each in (example.name, *example.arguments))
            shown = given.replace(SMALL, "...").replace(SMALL_LM, "...")
            is_right = code == example.code and example.says in printed
            all_right = all_right and is_right
            rows.append(f"| `gpipe {shown}` | {code} | {seconds:.0f} | {example.says} |")
            print(rows[-1], "" if is_right else f"WRONG\n{printed}", flush=True)
    if not all_right:
        return 1
    lines = [
        "# Every command, with an example: `python -m tests.slow.commands`",
        "",
        f"Measured, two cores, commit `{described()}`, {datetime.now(UTC):%Y-%m-%d}. Settings of small runs"
        " are left out; they are in",
        "`tests/slow/commands.py`.",
        "",
        "| example | exit code | seconds | prints |",
        "|---|---|---|---|",
        *rows,
    ]
    (ROOT / "docs/results/commands.md").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
