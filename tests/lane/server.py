"""A process of its own for the lane, because a backend is registered for the whole process.

    stdin     {"function": "tests.lane.run:run", "arguments": ["toy, 1f1b"], "mutation": null}
              {..., "mutation": [file, text, replacement]}
    stdout    {"result": [...], "error": null}

A function runs in this process, and the next one in the same. A mutation needs modules that are not imported yet: with
one the function runs in a forked child, which replaces the text when it imports the file. The file is not touched.
"""

import contextlib
import importlib
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
        self._process.kill()  # it has answered; to end by itself would take seconds
        self._process.wait()

    def run(self, case, mutation=None):
        """Returns the waits of a case and its error, None if it ran."""
        waits, error = self.call("tests.lane.run:run", case, mutation=mutation)
        return [tuple(wait) for wait in waits or ()], error

    def call(self, function, *arguments, mutation=None):
        """Returns the result of a function and its error, one of them None."""
        request = {"function": function, "arguments": arguments, "mutation": mutation}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:  # torch's engine aborts at some gradients of another device
            self._start()
            return None, "the process died"
        answer = json.loads(line)
        return answer["result"], answer["error"]


def serve():
    """Answers the requests of the tests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the product and its libraries print, at their import too, is no answer

    import torch

    from tests.lane import distributed  # noqa: F401

    torch.set_num_threads(1)
    # a backward in the calling thread: the engine has a thread for one stand-in device alone
    torch.autograd.grad_mode.set_multithreading_enabled(False)
    for line in sys.stdin:
        request = json.loads(line)
        if request["mutation"]:
            import transformers  # noqa: F401  # takes long, and every child would import it
        answer = in_child(request) if request["mutation"] else attempt(request)
        print(json.dumps(answer), file=answers, flush=True)


def attempt(request):
    """Calls the function in this process."""
    try:
        import suite.device

        if "standin" not in suite.device.MULTIPLIES_BF16_INTO_FP32:  # as CUDA does
            suite.device.MULTIPLIES_BF16_INTO_FP32 += ("standin",)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        return {"result": function(*request["arguments"]), "error": None}
    except Exception as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"result": None, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]}


def in_child(request):
    """Calls the function with the mutation in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        mutate(*request["mutation"])
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(attempt(request)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else {"result": None, "error": "the process died"}


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
