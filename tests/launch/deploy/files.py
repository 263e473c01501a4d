"""What several tests read of the files for clusters."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SLURM = "launch/deploy/slurm/train.sbatch"


def text(name):
    return (ROOT / name).read_text()


def asked_of_slurm():
    """The options that stand in the Slurm script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text(SLURM), re.MULTILINE))
