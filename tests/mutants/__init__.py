"""Measures which faults the tests find: it plants them one by one and runs the tests that execute the changed code.

    .venv/bin/python -m tests.mutants run OUT.jsonl          # about an hour; continues a run that was ended
    .venv/bin/python -m tests.mutants table OUT.jsonl
    .venv/bin/python -m tests.mutants run AFTER.jsonl --same-as OUT.jsonl
    .venv/bin/python -m tests.mutants compare OUT.jsonl AFTER.jsonl

The steps: ``operators.py`` lists what could be changed, ``choice.py`` draws from it, ``executed.py`` finds which test
executes which statement, ``lane.py`` runs tests on a changed copy of the repository, ``warm.py`` forks them.

mutmut 3 sees which functions a test calls in pytest's process alone, and most of the pipeline runs in processes of a
forkserver; cosmic-ray runs one command for all mutants; and neither removes a ``raise`` or swaps arguments.
"""
