"""One action of a run again: alone, in this process, by plain PyTorch, so that a debugger reaches the layers.

    checkpoint of step S - 1 --weights--> all layers
    micro-batch of step S  -> layer 0 -> ... -> [layers of the action's cell] -> ... -> loss      F and R
                           <-         <- ... <- [                           ] <- ... <-           B, I and W

The values are those of the run: weights, batch and seeds are the same, and layers do not know of the pipeline.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from experiments.base.experiment import Experiment
from experiments.registry import read_experiment_file
from launch.diff.plain_training import backward, build_layers, check_fits, forward
from launch.runs.checkpoints import checkpoints_to_use
from launch.runs.store import CACHE, RunFolder, find_run
from launch.train.command import prepare_same
from launch.worker.attempt import threads_of
from launch.worker.devices import this_machine
from launch.worker.distributed import init_process_group
from launch.worker.run_plan import RunPlan
from suite.device import MULTIPLIES_BF16_INTO_FP32
from suite.errors import CheckpointError, SettingError
from suite.pipeline.model.layers import Tensors
from suite.pipeline.model.topology import RankCoord
from suite.pipeline.planning.partition import cell_ranges
from suite.pipeline.runtime.layer_hooks import Place, watch_tensors
from suite.pipeline.runtime.weight_grad import with_deferrable_linears
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
    fingerprint if it recorded that step; returns whether none differs. With ``save`` writes the tensors to a file of
    ``torch.save``, by layer and what they are. Raises a SuiteError for any error that the user can fix."""
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise SettingError(f"--save is {save}; give a file in a folder that exists")
    run = find_run(name)
    chosen, plan = read_experiment_file(run.experiment), RunPlan.read(run.plan_json)
    layers = _layers_of(asked, chosen, plan)
    pipeline, threads = chosen.pipeline, threads_of(chosen)
    micro_batch = asked.replica * pipeline.micro_batches + asked.action.micro_batch
    console.print(f"{asked}: micro-batch {micro_batch} of the mini-batch, layers {layers.start} to {layers.stop - 1}")
    check_fits(chosen)
    prepare_same(run, chosen, console)
    alike = PipelineSettings(micro_batches=pipeline.micro_batches, replicas=pipeline.replicas)
    chosen = chosen.with_pipeline(alike)  # one stage, and so all inputs and targets of a replica
    with _alone(threads) as device:
        modules, loss = build_layers(chosen, device, plan.logits_bytes)
        _load(run, chosen, asked.step - 1, modules, console)
        if chosen.optimizer.precision == "bf16" and device.type in MULTIPLIES_BF16_INTO_FP32:
            modules = [with_deferrable_linears(module) for module in modules]  # as in a stage
        found = _tensors(chosen, modules, loss, layers, asked, device, stop)
    is_same = _compare(found, RunFingerprints.read(run.fingerprints), asked, micro_batch, device, console)
    if save is not None:
        torch.save({(place.layer, place.what): tensor.cpu() for place, tensor in found.items()}, save)
        console.print(f"written: {save}, {len(found)} tensors; torch.load reads them")
    return is_same


def _layers_of(asked: ReplayedAction, chosen: Experiment, plan: RunPlan) -> range:
    """Returns the layers of an action's cell. Raises SettingError for an action that the run does not have."""
    pipeline, action = chosen.pipeline, asked.action
    for what, value, count in (("replica", asked.replica, pipeline.replicas), ("stage", asked.stage, pipeline.stages)):
        if not 0 <= value < count:
            raise SettingError(f"{asked}: there is no {what} {value}; they go from 0 to {count - 1}")
    if not 1 <= asked.step <= chosen.train.steps:
        raise SettingError(f"{asked}: the run has steps 1 to {chosen.train.steps}")
    own = plan.schedule_config.actions(pipeline.stages, pipeline.micro_batches)[asked.stage]
    if action not in own:
        kinds = ", ".join(dict.fromkeys(each.kind for each in own))
        raise SettingError(
            f"{asked}: the stage's schedule has no such action; it has {kinds} of micro-batches 0 to "
            f"{pipeline.micro_batches - 1}, such as {own[0]} and {own[-1]}"
        )
    return cell_ranges(plan.cells, chosen.list_length)[action.cell(asked.stage, plan.coord(0, pipeline).placement)]


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
    if step == 0:
        if chosen.train.init_from is not None:
            raise CheckpointError("step 1 starts from another run's weights (train.init_from); replay a later one")
        return
    try:
        checkpoint = checkpoints_to_use(run, chosen, step, console.print)[0]
    except CheckpointError as error:
        raise CheckpointError(f"step {step + 1} starts from the weights after step {step}: {error}") from None
    checkpoint.check_layers(len(layers))
    for index, layer in enumerate(layers):
        load_layer(checkpoint, index, layer, checkpoint.read(index))


class _EndError(Exception):
    """The action's layers have run, and nothing else is needed."""


def _tensors(
    chosen: Experiment,
    layers: list[nn.Module],
    loss: nn.Module,
    cell: range,
    asked: ReplayedAction,
    device: torch.device,
    stop: Stop | None,
) -> dict[Place, Tensor]:
    """Runs the micro-batch as far as the action needs it; returns the tensors of the cell's layers."""
    found: dict[Place, Tensor] = {}
    goes_back, replicas = asked.action.kind in "BIW", chosen.pipeline.replicas

    def watch(place: Place, tensor: Tensor) -> None:
        if place.is_backward == goes_back:
            # a replica's backward starts with R times the gradient
            found[place] = (tensor / replicas if goes_back else tensor.clone()).cpu()

    def before(index: int, layer: nn.Module, inputs: Tensors) -> None:
        """A debugger shows the layer and its inputs here; ``debug layer.forward(*inputs)`` goes through it."""
        if index == cell.stop and not goes_back:
            raise _EndError
        if index == cell.start and stop is not None:
            stop()

    source = chosen.data_source(chosen.data_folder(CACHE).resolve(), RankCoord(asked.replica, 1, replicas))
    batch = source.batch(asked.step - 1)
    assert batch is not None, "one worker has the first and the last layer"
    own = {index: layers[index] for index in cell}
    watched = watch_tensors(own, loss if cell.stop == len(layers) else None, watch)
    with watched, torch.set_grad_enabled(goes_back), suppress(_EndError):
        objective = forward(layers, loss, batch, asked.action.micro_batch, chosen, asked.step - 1, device, before)
        if goes_back:
            if stop is not None:
                stop()
            backward(objective, batch.divisor / replicas)
    return found


def _compare(
    found: Mapping[Place, Tensor],
    recorded: RunFingerprints,
    asked: ReplayedAction,
    micro_batch: int,
    device: torch.device,
    console: Console,
) -> bool:
    """Prints each tensor, beside what the run recorded of it; returns whether none differs."""
    prefix, counts = "recomputed " if asked.action.kind == "R" else "", Counter[bool]()
    is_comparable = recorded.device == device.type
    for place, tensor in found.items():
        text = f"  layer {place.layer} {place.layer_type}: {_line(place, tensor)}"
        then = recorded.tensors.get((asked.step, micro_batch, place.layer, prefix + place.what))
        if then is not None and is_comparable:
            is_same = then.digest == Fingerprint.of(tensor).digest
            counts[is_same] += 1
            text += "; as recorded" if is_same else f"; DIFFERS from the recorded one, of norm {then.norm:.6g}"
        console.print(text)
    if not counts.total():
        why = f"on a {recorded.device} device" if recorded.tensors and not is_comparable else "none of these tensors"
        console.print(f"not compared: the run recorded {why} (train.fingerprint_steps)")
    elif counts[False]:
        console.print(f"{counts[False]} of {counts.total()} differ; another number of threads explains rounding")
    else:
        console.print(f"{counts.total()} of {len(found)} compared with what the run recorded: the same to the bit")
    return not counts[False]


def _line(place: Place, tensor: Tensor) -> str:
    wide = tensor.double()
    wrong = int((~wide.isfinite()).sum())
    largest = f", largest {float(wide.abs().nan_to_num(math.inf).max()):.3g}" if tensor.numel() else ""
    text = f"{place.what} {tuple(tensor.shape)}: norm {float(wide.norm()):.6g}{largest}"
    return text + (f", {wrong} of {tensor.numel()} not finite" if wrong else "")
