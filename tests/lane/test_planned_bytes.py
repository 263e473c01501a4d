"""A plan's bytes beside those alive in a step on the stand-in, which has CUDA's autocast and attention."""

import pytest

SMALL = (
    "model.blocks_per_stack=2 model.width=256 model.feed_forward=1024 model.heads=4 text.vocabulary=2000 "
    "pipeline.replicas=1 pipeline.stages=2 pipeline.micro_batches=6 train.batch_tokens=6144 "
)
LOSSES = 64
"""Bytes of the micro-batches' losses, which a plan does not count one by one."""

MOST = 1.08
"""Of two layers, which a stage of this small model has, a plan counts the tensor between them twice."""

SCHEDULES = (
    "pipeline.schedule=fill_drain pipeline.remat=except_last",
    "pipeline.schedule=fill_drain pipeline.remat=never",
    "pipeline.schedule=1f1b pipeline.remat=never",
    "pipeline.schedule=interleaved pipeline.virtual_stages=2 pipeline.remat=always",
    "pipeline.schedule=zero_bubble pipeline.remat=never",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        *((f"{schedule} model.dropout=0 optimizer.precision=bf16", MOST) for schedule in SCHEDULES),
        *((f"{schedule} model.dropout=0 optimizer.precision=fp32", MOST) for schedule in SCHEDULES[1:4]),
        # on CUDA a mask has a byte for each value; a plan counts those of the CPU, which are wider
        (f"{SCHEDULES[1]} model.dropout=0.1", 1.2),
    ],
)
def test_a_plan_has_room_for_its_step_and_hardly_more(shared_server, settings, most):
    stages, error = shared_server.call("tests.lane.live_bytes:bytes_of_stages", "t12_400m", SMALL + settings)
    assert error is None
    assert len(stages) == 2
    for _, planned, live in stages:
        assert live <= planned + LOSSES
        assert planned <= most * live
