"""Makes mini-batches in processes of their own, where the host runs ahead of the device: a thread would share the
interpreter with the one that launches kernels.

feed process 0   batch 4 . . batch 6 . .     one tensor of each dtype, in shared memory
feed process 1      batch 5 . . batch 7      the worker pins it, and cuts it into views
"""

from __future__ import annotations

import multiprocessing as mp
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from experiments.base.data_source import DataSource
from experiments.base.experiment import Experiment
from launch.worker.parent import end_with_parent
from launch.worker.prefetch import Prefetcher
from suite.cgroups import cpu_limit
from suite.device import is_host, module_of
from suite.errors import DataError, SuiteError, first_line
from suite.pipeline.model.microbatch import ReplicaBatch
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.runtime.executor import Executor

MAX_PROCESSES = 4
"""Each holds a mini-batch in shared memory and what its data needs, and one makes several a step of a large run."""

SHARED_MEMORY = Path("/dev/shm")


def feed_process_count(device: torch.device) -> int:
    """Returns how many processes make a worker's mini-batches: none on CPU cores, which compute themselves; beside a
    GPU its share of the node's cores without the worker's own, from 1 to MAX_PROCESSES."""
    if is_host(device):
        return 0
    cores: int = cpu_limit() // module_of(device).device_count()
    return max(1, min(MAX_PROCESSES, cores - 1))


def make_batches(experiment: Experiment, data: Path, source: DataSource, executor: Executor, start: int) -> Prefetcher:
    """Returns a worker's mini-batches from step ``start`` on: made by processes beside a GPU, otherwise by a thread, in
    the bubble on the first stage of several."""
    coord, steps = executor.coord, experiment.train.steps
    needs_data = source.is_thread_safe and (coord.is_first or coord.has_loss)
    processes = feed_process_count(executor.stage.device) if needs_data else 0
    make: Callable[[int], ReplicaBatch | None] = source.batch
    if processes:
        make = FeedProcesses(experiment, data, coord, range(start, steps), processes)
    fills_bubble = coord.is_first and not coord.has_loss and not processes
    # inferring shapes runs a user's layers, which may draw from generators that the main thread is using
    prepare = executor.prefetch_shapes if experiment.task != "custom" else None
    batches = Prefetcher(make, steps, prepare, source.is_thread_safe, not fills_bubble)
    if fills_bubble:
        executor.on_first_backward = batches.start_next
    return batches


class FeedProcesses:
    """Returns a worker's mini-batches, made by processes that work ahead and end with this one."""

    def __init__(
        self, experiment: Experiment, data: Path, coord: RankCoord, steps: Sequence[int], processes: int
    ) -> None:
        """Starts the processes. ``steps`` are those that will be asked for, in order.

        Call it in the thread that has set the device: DataLoader pins memory for the device of its caller.
        """
        self._steps = iter(steps)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        loader: DataLoader[FlatBatch | SuiteError] = DataLoader(
            _Source(experiment, data, coord),
            batch_size=None,
            sampler=steps,
            num_workers=processes,
            prefetch_factor=1,
            pin_memory=torch.accelerator.is_available(),
            multiprocessing_context=context,
            worker_init_fn=_end_with_worker,
            generator=torch.Generator(),  # the default one is the layers'
        )
        self._batches = iter(loader)

    def __call__(self, step: int) -> ReplicaBatch:
        """Returns the mini-batch of the next step.

        Raises the SuiteError of the data; ChildProcessError when it raised another exception, or a process was killed.
        """
        expected = next(self._steps)
        assert step == expected, (step, expected)
        try:
            made: FlatBatch | SuiteError = next(self._batches)
        except Exception as error:
            how = f"died, perhaps because the memory is too small: {first_line(error)}"
            if str(error).startswith("Caught "):  # an exception in the process; its traceback ends with the message
                how = f"failed: {str(error).strip().splitlines()[-1]}"
            raise ChildProcessError(f"a process that makes mini-batches {how}") from error
        if isinstance(made, SuiteError):
            raise made
        return made.unpack()


@dataclass(frozen=True)
class FlatBatch:
    """A mini-batch with one tensor of each dtype, instead of some for each micro-batch: a message between processes, or
    a block of pinned memory, costs as much for a small tensor as for a large one."""

    flat: dict[torch.dtype, Tensor]
    shapes: Sequence[Sequence[tuple[torch.dtype, torch.Size]]]
    """Of the inputs of each micro-batch, then of the targets of each."""
    others: ReplicaBatch
    """What is not a tensor."""

    @classmethod
    def of(cls, batch: ReplicaBatch) -> FlatBatch:
        """Copies a mini-batch."""
        parts = [*batch.inputs, *batch.targets]
        shapes = [[(tensor.dtype, tensor.shape) for tensor in part] for part in parts]
        flat = {
            dtype: torch.cat([tensor.flatten() for part in parts for tensor in part if tensor.dtype == dtype])
            for dtype in {dtype for part in shapes for dtype, _ in part}
        }
        return cls(flat, shapes, replace(batch, inputs=(), targets=()))

    def share(self, step: int) -> FlatBatch:
        """Moves the tensors to shared memory. Raises DataError when they do not fit."""
        try:
            for tensor in self.flat.values():
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            usage, needed = shutil.disk_usage(SHARED_MEMORY), sum(tensor.nbytes for tensor in self.flat.values())
            raise DataError(
                f"the mini-batch of step {step + 1} takes {needed / 2**20:.1f} MiB of shared memory, and "
                f"{SHARED_MEMORY} has {usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB left "
                f"({first_line(error)}); each worker keeps up to {MAX_PROCESSES + 1} mini-batches there, so start the "
                "container with a larger --shm-size (Kubernetes: an emptyDir with medium: Memory there)"
            ) from error
        return self

    def pin_memory(self) -> FlatBatch:
        """Returns a copy in pinned memory, from which copies to the device are asynchronous. DataLoader calls it."""
        return replace(self, flat={dtype: tensor.pin_memory() for dtype, tensor in self.flat.items()})

    def unpack(self) -> ReplicaBatch:
        """Returns the mini-batch, whose tensors are views."""
        all_shapes = [shape for part in self.shapes for shape in part]
        views = {
            dtype: iter(torch.split(tensor, [shape.numel() for own, shape in all_shapes if own == dtype]))
            for dtype, tensor in self.flat.items()
        }
        parts = [tuple(next(views[dtype]).view(shape) for dtype, shape in part) for part in self.shapes]
        half = len(parts) // 2
        return replace(self.others, inputs=parts[:half], targets=parts[half:])


class _Source(Dataset[FlatBatch | SuiteError]):
    """The mini-batches by step, as DataLoader reads a data set in its processes."""

    def __init__(self, experiment: Experiment, data: Path, coord: RankCoord) -> None:
        self._experiment, self._data, self._coord = experiment, data, coord

    @cached_property
    def _source(self) -> DataSource:
        return self._experiment.data_source(self._data, self._coord)

    def __getitem__(self, step: int) -> FlatBatch | SuiteError:
        try:
            batch = self._source.batch(step)
            assert batch is not None, "only the first and the last stage have feed processes"
            return FlatBatch.of(batch).share(step)
        except SuiteError as error:  # DataLoader would put a traceback into its message
            return error


def _end_with_worker(process: int) -> None:
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by which its worker ends it
    mp.current_process().daemon = False  # other people's data may start processes too
