"""Stages of several cells whose skips stay on the device: what a stage holds, against its plan."""

from tests.suite.pipeline.planning.test_planned_memory import assert_memory_matches_plan


def test_amoebanet_on_stages_of_two_cells_needs_the_bytes_of_its_plan(tmp_path):
    # a skip that is also the output counts as sent and as expected, and is one tensor
    settings = {"schedule": "interleaved", "virtual_stages": 2}
    assert_memory_matches_plan("amoebanet", (1, 1, 1, 4), settings, tmp_path, most=1.25)
