"""A process of its own for the lane, because a backend is registered for the whole process.

    stdin    {"case": "toy, 1f1b"}                                    stdout   {"waits": [...], "error": null}
             {"case": ..., "mutation": [file, text, replacement]}

A case runs in this process, and the next one in the same. A mutation needs modules that are not imported yet: its case
runs in a forked child, which replaces the text when it imports the file. The file itself is not touched.
"""

import contextlib
import importlib.machinery
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Server:
    """The tests' side. A context, in which the process runs."""

    def __enter__(self):
        self._start()
        return self

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.lane.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait()

    def run(self, case, mutation=None):
        """Returns the waits of a case and its error, None if it ran."""
        self._process.stdin.write(json.dumps({"case": case, "mutation": mutation}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:  # torch's engine aborts at some gradients of another device
            self._start()
            return [], "the process died"
        answer = json.loads(line)
        return [tuple(wait) for wait in answer["waits"]], answer["error"]


def serve():
    """Answers the requests of the tests."""
    import torch
    import transformers  # noqa: F401  # what takes long to import is imported once, before processes are forked

    from tests.lane import distributed  # noqa: F401

    torch.set_num_threads(1)
    # a backward in the calling thread: the engine has a thread for one stand-in device alone
    torch.autograd.grad_mode.set_multithreading_enabled(False)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the product prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answer = in_child(request) if request["mutation"] else attempt(request["case"])
        print(json.dumps(answer), file=answers, flush=True)


def attempt(case):
    """Runs a case in this process."""
    try:
        import suite.device

        if "standin" not in suite.device.MULTIPLIES_BF16_INTO_FP32:  # as CUDA does
            suite.device.MULTIPLIES_BF16_INTO_FP32 += ("standin",)
        from tests.lane import run

        return {"waits": run.run(case), "error": None}
    except Exception as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"waits": [], "error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]}


def in_child(request):
    """Runs a case with a mutation in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        mutate(*request["mutation"])
        answer = attempt(request["case"])
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else {"waits": [], "error": "the process died"}


def mutate(file, text, replacement):
    """Replaces a text in the source of a module that is imported later."""
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, fullname):
        if Path(loader.path) != ROOT / file:
            return original(loader, fullname)
        return compile(Path(loader.path).read_text().replace(text, replacement), loader.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_code


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()
