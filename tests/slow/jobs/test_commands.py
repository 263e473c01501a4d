"""Every command, with its example."""

from tests.slow.commands import outcomes


def test_the_example_of_each_command_runs(tmp_path):
    for example, _, code, printed in outcomes(tmp_path):
        assert (code, example.says in printed) == (example.code, True), f"{example}\n{printed}"
