"""Does a model train in a pipeline as in plain PyTorch? Trains a few steps in pipelines of several shapes, and compares
all tensors with those of plain PyTorch.

    plain PyTorch -- again                            is it the same each time?
                  -- 1 stage, 2, 4                    cells, messages
                  -- recomputed, split backwards      schedules
                  -- 2 replicas                       sums over replicas
                  -- other micro-batches              what depends on the split
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from experiments.base.hints import command
from experiments.registry import find
from launch.backends.processes import run_processes
from launch.backends.select import select_backend
from launch.diff.command import compare_runs
from launch.diff.compare import Comparison
from launch.diff.few_steps import FewSteps
from launch.diff.layer_traits import LayerTraits, find_traits
from launch.runs.store import CACHE, RunFolder
from suite.errors import PlanError, SettingError, SuiteError
from suite.settings import AUTO, PipelineSettings

MICRO_BATCHES = 4
"""Where the settings leave their number to the plan."""

PLAIN_AGAIN = "plain PyTorch again"


def check(few: FewSteps, console: Console) -> bool:
    """Checks an experiment, and prints a line for each shape; returns whether all are the same training as plain
    PyTorch, at least up to rounding. Runs that are not are kept. Raises a SuiteError for any error that the user can
    fix, such as a layer that no pipeline can train."""
    find(few.name)
    cluster = select_backend(few.launcher).cluster()
    if cluster.kind == "gpu":
        raise SettingError("plain PyTorch runs on CPUs; check the model there, with CUDA_VISIBLE_DEVICES=")
    requested, note = few.resolved()
    if note:
        console.print(note)
    count = requested.pipeline.micro_batches
    micro_batches = MICRO_BATCHES if count == AUTO else count * requested.pipeline.replicas
    chosen = few.prepared(requested.with_pipeline(PipelineSettings(micro_batches=micro_batches)))
    data = chosen.data_folder(CACHE).resolve()
    if faults := chosen.with_prepared(data).trial_errors():
        raise PlanError(faults)
    console.print(f"{chosen.list_length} layers, {few.steps} steps of {micro_batches} micro-batches")
    traits: LayerTraits = run_processes(find_traits, 1, chosen, data)[0]
    for line in _trait_lines(traits):
        console.print(f"  {line}")
    depends_on_split = any(trait.depends_on_split for _, found in traits.values() for trait in found)
    console.print("each tensor compared with plain PyTorch (a):")
    plain = few.train_plainly(chosen)
    results = [_compare(PLAIN_AGAIN, lambda: few.train_plainly(chosen), plain, console)]
    for shape in _shapes(micro_batches, cluster.devices, chosen.list_length, depends_on_split):
        label = _label(shape, micro_batches)
        results.append(_compare(label, partial(few.train, chosen.with_pipeline(shape)), plain, console))
    return _conclude(results, plain, console)


def _trait_lines(traits: LayerTraits) -> Iterator[str]:
    """Yields a line for each trait, with all layers that have it."""
    layers: dict[str, list[str]] = {}
    for index, (layer_type, found) in traits.items():
        for trait in found:
            layers.setdefault(f"{layer_type} {trait.text}", []).append(str(index))
    for text, indices in layers.items():
        yield f"layer {indices[0]}" + "".join(f", {index}" for index in indices[1:]) + f": {text}"


def _shapes(micro_batches: int, devices: int, layers: int, depends_on_split: bool) -> Iterator[PipelineSettings]:
    """Yields pipelines that train the same mini-batches."""
    same = partial(PipelineSettings, micro_batches=micro_batches)
    yield same(stages=1, remat="never")
    for stages in (2, 4):
        if stages <= min(devices, layers):
            yield same(stages=stages, schedule="fill_drain", remat="always")
            yield same(stages=stages, schedule="1f1b", remat="never")
            yield same(stages=stages, schedule="zero_bubble", remat="never")
        if stages <= devices and 2 * stages <= layers:
            yield same(stages=stages, schedule="zbv", virtual_stages=2, remat="auto")
    half, rest = divmod(micro_batches, 2)
    if not rest and devices >= 2:
        yield PipelineSettings(micro_batches=half, replicas=2)
    if not rest and devices >= 4 and layers >= 2:
        yield PipelineSettings(micro_batches=half, stages=2, replicas=2, schedule="1f1b")
    if not rest and not depends_on_split:
        yield PipelineSettings(micro_batches=half)


def _label(shape: PipelineSettings, micro_batches: int) -> str:
    """Returns the settings that were chosen, without a number of micro-batches that all have."""
    chosen = shape.model_dump(exclude_unset=True)
    return " ".join(
        f"{name}={value}" for name, value in chosen.items() if (name, value) != ("micro_batches", micro_batches)
    )


@dataclass(frozen=True)
class _Result:
    """Of one shape."""

    label: str
    run: RunFolder | None
    """None where it could not train."""
    comparison: Comparison | None

    @property
    def is_same(self) -> bool:
        return self.comparison is not None and self.comparison.is_explained


def _compare(label: str, train: Callable[[], RunFolder], plain: RunFolder, console: Console) -> _Result:
    began = time.perf_counter()
    try:
        run = train()
        found = compare_runs(plain, run)
    except SuiteError as error:
        console.print(f"  {label}: fails: {error}")
        return _Result(label, None, None)
    took = f"{time.perf_counter() - began:.0f} s"
    if not found.is_explained:
        console.print(f"  {label}: OTHER NUMBERS ({took})")
        for line in found.lines():
            console.print(f"    {line}")
    elif found.differences:
        total = found.equal_count + len(found.differences)
        console.print(f"  {label}: same up to rounding; {found.equal_count:,} of {total:,} to the bit ({took})")
    else:
        console.print(f"  {label}: same to the bit, {found.equal_count:,} tensors ({took})")
    return _Result(label, run, found)


def _conclude(results: Sequence[_Result], plain: RunFolder, console: Console) -> bool:
    """Prints the result, and removes the runs that nobody has to look at."""
    others = [one for one in results if not one.is_same]
    for one in results:
        if one.is_same and one.run is not None:
            shutil.rmtree(one.run.path)
    if not others:
        shutil.rmtree(plain.path)
        with suppress(OSError):  # other runs are in it
            plain.path.parent.rmdir()
        console.print(f"all {len(results)} are the same training as plain PyTorch")
        return True
    console.print(f"{len(others)} of {len(results)} are not the same training as plain PyTorch")
    if others[0].label == PLAIN_AGAIN:
        console.print("plain PyTorch itself gives other numbers each time, so no pipeline can give the same")
    console.print(f"kept for {command('diff', RUN='a b')}: a is {plain.path}, b is one of")
    for one in others:
        if one.run is not None:
            console.print(f"  {one.run.path}  {one.label}")
    return False
