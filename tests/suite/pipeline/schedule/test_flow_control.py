"""How many messages of a cell may be in flight."""

import pytest

from suite.pipeline.schedule.flow_control import MAX_INFLIGHT_SENDS, flow_control


@pytest.mark.parametrize(("stages", "virtual_stages", "sends"), [(2, 1, 4), (64, 1, 4), (4, 2, 4), (16, 2, 10)])
def test_one_cell_a_stage_has_few_sends_and_several_have_as_many_as_a_group_needs(stages, virtual_stages, sends):
    assert MAX_INFLIGHT_SENDS == 4
    for transport, ahead in (("gloo", (2, 2)), ("nccl", (1, 0))):
        flow = flow_control(transport, stages, virtual_stages)
        assert (flow.max_inflight_sends, flow.recvs_ahead(1), flow.recvs_ahead(-1)) == (sends, *ahead)
        assert flow.max_sends_to(3) == sends + 2
