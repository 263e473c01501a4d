"""Schedules of torch.distributed.pipelining, written by torch itself."""

from torch.distributed.pipelining import schedules

KINDS = {
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}


def dump(kind, path, stages, micro_batches, cells_per_stage=2):
    """Writes a schedule of torch as CSV. Only the order of actions is computed: no process group is needed."""
    schedule = object.__new__(KINDS[kind])
    schedule.pp_group_size, schedule.n_local_stages, schedule.num_stages = (
        stages, cells_per_stage, stages * cells_per_stage,
    )  # fmt: skip
    schedule._n_microbatches = micro_batches
    schedule.number_of_rounds = max(1, micro_batches // stages)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(stages)}
    schedule._dump_csv(path, format="compute_only")
    return path
