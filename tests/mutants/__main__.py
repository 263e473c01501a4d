"""Plants each fault that was written by hand and asks the tests of its folder, or those in the folders that are given:
``python -m tests.mutants tests/suite/training``."""

import subprocess
import sys
from pathlib import Path

from tests.mutants.by_hand import FAULTS


def main(folders: list[str]) -> None:
    """Prints for each fault whether the tests find it."""
    for fault in FAULTS:
        path = Path(fault.file)
        text = path.read_text()
        asked = folders or sorted(map(str, Path("tests", path.parent).glob("test_*.py")))
        command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *asked]
        path.write_text(text.replace(fault.text, fault.replacement))
        try:
            done = subprocess.run(command, capture_output=True, timeout=1800)
        finally:
            path.write_text(text)
        outcome = {0: "NOT FOUND", 1: "found"}.get(done.returncode, f"exit code {done.returncode}")
        print(f"{outcome}: {fault.file}: {fault.what}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
