"""Does a model train in a pipeline as in plain PyTorch? Trains a few steps in pipelines of several shapes, and compares
all tensors with those of plain PyTorch.

    plain PyTorch -- 1 stage, 2, 4                    cells, messages
                  -- recomputed, split backwards      schedules
                  -- 2 replicas                       sums over replicas
                  -- other micro-batches              rows that depend on each other
                  -- again                            if no pipeline has its bits: is it repeatable?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments.base.experiment import Experiment
from experiments.base.hints import command
from experiments.custom.layer_traits import LayerTraits, find_traits
from launch.diff.command import fingerprints_of
from launch.diff.compare import Comparison, compare
from launch.diff.plain_training import REMEDY, check_fits
from launch.diff.short_training import ShortTraining, memory_fault
from launch.runs.store import CACHE, RunFolder, remove_run
from suite.errors import PlacementError, PlanError, SuiteError
from suite.pipeline.model.topology import RankCoord
from suite.settings import AUTO, PipelineSettings
from suite.training.fingerprints import RunFingerprints

MICRO_BATCHES = 4
"""Where the settings leave their number to the plan."""

PLAIN_AGAIN = "plain PyTorch again"

_Trained = tuple[RunFolder, Comparison]
"""The run in one shape, and how it compares."""


def check(training: ShortTraining, console: Console) -> bool:
    """Checks an experiment, and prints a line for each shape; returns whether all are the same training as plain
    PyTorch, at least up to rounding. Runs that are not are kept. Raises a SuiteError for any error that the user can
    fix, such as a layer that no pipeline can train."""
    requested, note = training.resolved()
    if note:
        console.print(note)
    asked = requested.pipeline
    if asked.micro_batches == AUTO:
        count = max(1, min(MICRO_BATCHES, requested.min_rows) // asked.replicas)
        asked = asked.model_copy(update={"micro_batches": count})
    micro_batches = asked.micro_batches * asked.replicas
    own = {"as set": asked} if "pipeline." in training.settings else {}
    check_fits(requested)
    chosen = training.prepared(requested.with_pipeline(PipelineSettings(micro_batches=micro_batches)), console)
    data = chosen.data_folder(CACHE).resolve()
    if faults := chosen.with_prepared(data).trial_errors():
        raise PlanError(faults)
    console.print(f"{chosen.list_length} layers, {training.steps} steps of {micro_batches} micro-batches")
    traits = _traits(chosen, data)
    for line in _trait_lines(traits):
        console.print(f"  {line}")
    depends_on_split = any(trait.depends_on_split for _, found in traits.values() for trait in found)
    shapes, left_out = _shapes(micro_batches, chosen.list_length, depends_on_split)
    for shape in list(shapes):
        if fault := memory_fault(chosen.with_prepared(data).with_pipeline(shape)):
            shapes.remove(shape)
            left_out.append(f"{_label(shape, micro_batches)}, because {fault}")
    for reason in left_out:
        console.print(f"not tried: {reason}")
    if not shapes and not own:
        raise PlacementError(f"none of the pipelines fits this machine; {REMEDY}")
    console.print("each tensor compared: a is plain PyTorch, b the pipeline; layers count from 0:")
    plain = training.train_plainly(chosen)
    comparison = partial(_compare, fingerprints_of(plain), chosen.optimizer.precision, traits, console)
    labelled = own | {_label(shape, micro_batches): shape for shape in shapes}
    results = {
        label: comparison(label, partial(training.train, chosen.with_pipeline(shape)))
        for label, shape in labelled.items()
    }
    if all(result is None or result[1].differences for result in results.values()):
        results[PLAIN_AGAIN] = comparison(PLAIN_AGAIN, lambda: training.train_plainly(chosen))
    is_same = _conclude(results, plain, console) and not any(one.is_fault for _, own in traits.values() for one in own)
    for line in _trait_lines(traits, only_with_remedy=True):
        console.print(f"is this meant? {line}")
    return is_same


def _traits(chosen: Experiment, data: Path) -> LayerTraits:
    """Returns the traits of an experiment's layers on its first micro-batch."""
    batch = chosen.data_source(data, RankCoord(0, 1, 1)).batch(0)
    assert batch is not None
    return find_traits(*chosen.build(), batch.inputs[0], batch.targets[0])


def _trait_lines(traits: LayerTraits, only_with_remedy: bool = False) -> Iterator[str]:
    """Yields a line for each trait, with all layers that have it."""
    layers: dict[str, list[str]] = {}
    for index, (layer_type, found) in traits.items():
        for trait in found:
            remedy = f"; {trait.remedy}" if trait.remedy else ""
            if remedy or not only_with_remedy:
                layers.setdefault(f"{layer_type} {trait.text}{remedy}", []).append(str(index))
    for text, indices in layers.items():
        yield f"layer{'s' if len(indices) > 1 else ''} {', '.join(indices)}: {text}"


def _shapes(micro_batches: int, layers: int, depends_on_split: bool) -> tuple[list[PipelineSettings], list[str]]:
    """Returns pipelines that train the same mini-batches, and why others are left out."""
    same = partial(PipelineSettings, micro_batches=micro_batches)
    shapes, left_out = [same(stages=1, remat="never")], []
    if layers >= 2:
        shapes.append(same(stages=2, schedule="fill_drain", remat="always"))
        shapes.append(same(stages=2, schedule="zero_bubble", remat="never"))
    if layers >= 4:
        shapes.append(same(stages=2, schedule="zbv", virtual_stages=2, remat="auto"))
        shapes.append(same(stages=4, schedule="1f1b"))
    else:
        left_out.append(f"stages=4, because the model has {layers} layers")
    if micro_batches % 2:
        left_out.append(f"replicas=2 and other micro-batches, because {micro_batches} cannot be halved")
        return shapes, left_out
    half = partial(PipelineSettings, micro_batches=micro_batches // 2)
    shapes.append(half(stages=2, replicas=2, schedule="1f1b") if layers >= 2 else half(replicas=2))
    if depends_on_split:
        left_out.append("other micro-batches, because layers named above depend on how the mini-batch is split")
    else:
        shapes.append(half())
    return shapes, left_out


def _label(shape: PipelineSettings, micro_batches: int) -> str:
    """Returns the settings that were chosen, without a number of micro-batches that all have."""
    chosen = shape.model_dump(exclude_unset=True)
    return " ".join(
        f"{name}={value}" for name, value in chosen.items() if (name, value) != ("micro_batches", micro_batches)
    )


def _compare(
    plain: RunFingerprints,
    precision: str,
    traits: LayerTraits,
    console: Console,
    label: str,
    train: Callable[[], RunFolder],
) -> _Trained | None:
    """Trains in one shape, and prints how that compares; returns None where it could not train."""
    began = time.perf_counter()
    try:
        run = train()
        found = compare(plain, fingerprints_of(run), precision)
    except SuiteError as error:
        console.print(f"  {label}: FAILS: {error}")
        return None
    took = f"{time.perf_counter() - began:.0f} s"
    if not found.is_explained:
        console.print(f"  {label}: DIFFERS ({took})")
        for line in found.lines():
            console.print(f"    {line}")
        index = found.first_difference.key[2] if found.first_difference is not None else -1
        for trait in traits.get(index, ("", []))[1]:
            console.print(f"    layer {index} {trait.text}")
    elif found.differences:
        total = found.equal_count + len(found.differences)
        console.print(f"  {label}: same up to rounding; {found.equal_count:,} of {total:,} to the bit ({took})")
    else:
        console.print(f"  {label}: same to the bit, {found.equal_count:,} tensors ({took})")
    return run, found


def _conclude(results: Mapping[str, _Trained | None], plain: RunFolder, console: Console) -> bool:
    """Prints the result, and removes the runs that nobody has to look at."""
    trained = {label: result for label, result in results.items() if result is not None}
    others = {label: run for label, (run, comparison) in trained.items() if not comparison.is_explained}
    for label, (run, _) in trained.items():
        if label not in others:
            remove_run(run)
    failed = len(results) - len(trained)
    if not others and not failed:
        remove_run(plain)
        buffers = {one.key[2:]: one.key[2] for _, comparison in trained.values() for one in comparison.other_buffers}
        layers = ", ".join(map(str, sorted(set(buffers.values()))))
        but = f", but for {len(buffers)} buffers (layer {layers}), which evaluation may use" if buffers else ""
        console.print(f"all {len(results)} are the same training as plain PyTorch{but}")
        return True
    fail = f", and {failed} fail" if failed else ""
    console.print(f"{len(others)} of {len(results)} are not the same training as plain PyTorch{fail}")
    if PLAIN_AGAIN in others.keys() | (results.keys() - trained.keys()):
        console.print("plain PyTorch itself gives other numbers each time, so no pipeline can give the same")
    for label, run in others.items():
        console.print(f"  compare {label} again: {command('diff', RUN=f'{plain.path} {run.path}')}")
    return False
