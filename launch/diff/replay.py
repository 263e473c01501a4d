"""One action of a run again: alone, in this process, by plain PyTorch, so that a debugger reaches the layers.

    checkpoint of step S - 1 --weights--> all layers
    micro-batch of step S  -> layer 0 -> ... -> [layers of the action's cell] -> ... -> loss      F and R
                           <-         <- ... <- [                           ] <- ... <-           B, I and W

The values are those of the run: weights, batch and seeds are the same, and layers do not know of the pipeline.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.diff.plain_training import backward, build_layers, forward
from launch.runs.checkpoints import checkpoints_to_use
from launch.runs.store import CACHE, RunFolder, find_run
from launch.train.command import prepare_same
from launch.worker.attempt import threads_of
from launch.worker.devices import this_machine
from launch.worker.distributed import init_process_group
from launch.worker.run_plan import RunPlan
from suite.errors import CheckpointError, SettingError
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.layer_hooks import Place, watch_tensors
from suite.pipeline.schedule.action import Action
from suite.settings import PipelineSettings
from suite.training.checkpoint import load_layer
from suite.training.fingerprints import Fingerprint, RunFingerprints

Stop = Callable[[], object]
"""Called before the action's first layer runs, and before its backward."""


@dataclass(frozen=True)
class ReplayedAction:
    """An action of a step, counted from 1, on one worker."""

    step: int
    replica: int
    stage: int
    action: Action

    def __str__(self) -> str:
        return f"{self.action} of step {self.step} on replica {self.replica}, stage {self.stage}"


def replay(name: str, asked: ReplayedAction, stop: Stop | None, save: Path | None, console: Console) -> bool:
    """Replays an action of a run, prints a line for each tensor of its layers, and compares it with the run's
    fingerprint if it recorded that step; returns whether all are the same. With ``save`` writes the tensors to a file
    of ``torch.save``, by layer and what they are. Raises a SuiteError for any error that the user can fix."""
    run = find_run(name)
    chosen, plan = read_experiment_file(run.experiment), RunPlan.read(run.plan_record)
    layers = _layers_of(asked, chosen, plan)
    pipeline = chosen.pipeline
    micro_batch = asked.replica * pipeline.micro_batches + asked.action.micro_batch
    console.print(f"{asked}: micro-batch {micro_batch} of the mini-batch, layers {layers.start} to {layers.stop - 1}")
    prepare_same(run, chosen, console)
    chosen = chosen.with_pipeline(PipelineSettings(micro_batches=pipeline.micro_batches * pipeline.replicas))
    with _alone(threads_of(chosen)) as device:
        modules, loss = build_layers(chosen, device, plan.logits_bytes)
        _load(run, chosen, asked.step - 1, modules, console)
        found = _tensors(chosen, modules, loss, layers, asked, micro_batch, device, stop)
    recorded = RunFingerprints.read(run.fingerprints).tensors
    differing = 0
    for place, tensor in found.items():
        then = recorded.get((asked.step, micro_batch, place.layer, place.what))
        is_same = then is None or then.digest == Fingerprint.of(tensor).digest
        differing += not is_same
        console.print(f"  layer {place.layer} {place.layer_type}: {_line(place, tensor)}{_beside(then, is_same)}")
    if save is not None:
        torch.save({(place.layer, place.what): tensor.cpu() for place, tensor in found.items()}, save)
        console.print(f"written: {save}, {len(found)} tensors; torch.load reads them")
    return not differing


def _layers_of(asked: ReplayedAction, chosen: Experiment, plan: RunPlan) -> range:
    """Returns the layers of an action's cell. Raises SettingError for an action that the run does not have."""
    pipeline, config, action = chosen.pipeline, plan.schedule_config, asked.action
    for what, value, count in (
        ("replica", asked.replica, pipeline.replicas),
        ("stage", asked.stage, pipeline.stages),
        ("micro-batch", action.micro_batch, pipeline.micro_batches),
        ("cell of a stage", action.virtual_stage, config.virtual_stages),
    ):
        if not 0 <= value < count:
            raise SettingError(f"{asked}: there is no {what} {value}; they go from 0 to {count - 1}")
    if not 1 <= asked.step <= chosen.train.steps:
        raise SettingError(f"{asked}: the run has steps 1 to {chosen.train.steps}")
    placement = plan.coord(0, pipeline).placement
    return cell_ranges(plan.cells, chosen.list_length)[action.cell(asked.stage, placement)]


@contextmanager
def _alone(threads: int) -> Iterator[torch.device]:
    """A context in which this process is a job of one worker; yields its device."""
    with tempfile.TemporaryDirectory() as folder:
        gpu = 0 if this_machine().kind == "gpu" else None
        device = init_process_group(0, 1, f"file://{folder}/rendezvous", threads, gpu)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def _load(run: RunFolder, chosen: Experiment, step: int, layers: list[nn.Module], console: Console) -> None:
    """Loads the weights after ``step`` steps; the initial ones are there. Raises CheckpointError without a checkpoint
    of that step."""
    if step == 0 and chosen.train.init_from is None:
        return
    try:
        checkpoint = checkpoints_to_use(run, chosen, step, console.print)[0]
    except CheckpointError as error:
        raise CheckpointError(f"step {step + 1} starts from the weights after step {step}: {error}") from None
    checkpoint.check_layers(len(layers))
    for index, layer in enumerate(layers):
        load_layer(checkpoint, index, layer, checkpoint.read(index))


def _tensors(
    chosen: Experiment,
    layers: list[nn.Module],
    loss: nn.Module,
    cell: range,
    asked: ReplayedAction,
    micro_batch: int,
    device: torch.device,
    stop: Stop | None,
) -> dict[Place, Tensor]:
    """Runs the micro-batch, and for a backward back; returns the tensors of the cell's layers."""
    found: dict[Place, Tensor] = {}
    goes_back = asked.action.kind in "BIW"

    def watch(place: Place, tensor: Tensor) -> None:
        if place.is_backward == goes_back:
            found[place] = tensor.clone()

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """A debugger shows the layer and its inputs here; ``debug layer.forward(*inputs)`` goes through it."""
        assert stop is not None
        stop()

    source = chosen.data_source(chosen.data_folder(CACHE).resolve(), RankCoord(0, 1, 1))
    batch = source.batch(asked.step - 1)
    assert batch is not None, "one worker has the first and the last layer"
    tensors, targets = (
        tuple(tensor.to(device) for tensor in of_each[micro_batch]) for of_each in (batch.inputs, batch.targets)
    )
    own = {index: layers[index] for index in cell}
    with ExitStack() as stack:
        stack.enter_context(watch_tensors(own, loss if cell.stop == len(layers) else None, watch))
        if stop is not None:
            stack.callback(layers[cell.start].register_forward_pre_hook(before).remove)
        objective = forward(layers, loss, tensors, targets, chosen, asked.step - 1, micro_batch)
        if goes_back:
            if stop is not None:
                stop()
            backward(objective, batch.divisor)
    return found


def _line(place: Place, tensor: Tensor) -> str:
    wide = tensor.double()
    wrong = int((~wide.isfinite()).sum())
    text = f"{place.what} {tuple(tensor.shape)}: norm {float(wide.norm()):.6g}"
    if tensor.numel():
        text += f", largest {float(wide.abs().nan_to_num(math.inf).max()):.3g}"
    return text + (f", {wrong} of {tensor.numel()} not finite" if wrong else "")


def _beside(then: Fingerprint | None, is_same: bool) -> str:
    if then is None:
        return ""
    return "; as recorded, to the bit" if is_same else f"; DIFFERS from the recorded one, of norm {then.norm:.6g}"
