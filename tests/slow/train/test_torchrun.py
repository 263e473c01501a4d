"""LAUNCHER=env in processes of torchrun: an error is one sentence, and all ranks end with its exit code."""

from tests.launch.backends.test_env_ranks import OWN, torchrun


def test_an_error_is_one_sentence_and_all_ranks_have_its_exit_code(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    code, shown = torchrun(tmp_path, "experiment", "own.py:small", "--set", "train.steps=many")
    assert code == 1  # torchrun's own
    assert shown.count("error: ") == 1
    assert shown.count("exitcode : 2 (pid") == 2
