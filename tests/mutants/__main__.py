"""Plants each fault that was written by hand and asks the tests of its folder, or those in what is given:
``python -m tests.mutants tests/suite/training``."""

import subprocess
import sys
from pathlib import Path

from tests.mutants.by_hand import FAULTS


def main(given: list[str]) -> None:
    """Prints for each fault whether the tests find it."""
    if missing := [name for name in given if not Path(name).exists()]:
        sys.exit(f"there are no tests {' '.join(missing)}")
    for fault in FAULTS:
        path = Path(fault.file)
        text = path.read_text()
        assert text.count(fault.text) == 1, f"{fault.what}: its text must occur once in {fault.file}"
        path.write_text(text.replace(fault.text, fault.replacement))
        try:
            outcome = _outcome(given or sorted(map(str, Path("tests", path.parent).glob("test_*.py"))))
        finally:
            path.write_text(text)
        print(f"{outcome}: {fault.file}: {fault.what}", flush=True)


def _outcome(tests: list[str]) -> str:
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    try:
        code = subprocess.run(command, capture_output=True, timeout=1800).returncode
    except subprocess.TimeoutExpired:
        return "no end in half an hour"
    return {0: "NOT FOUND", 1: "found"}.get(code, f"pytest ended with {code}")


if __name__ == "__main__":
    main(sys.argv[1:])
