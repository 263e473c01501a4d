"""One run from name to summary: resolve, prepare the text, make the folder, start the workers, tell what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import filelock
from rich.console import Console

from experiments.experiment import Experiment
from experiments.registry import find, resolve
from experiments.scales import Asked, with_changes
from launch.devices import cores, this_machine
from launch.follow import Follower
from launch.runs import CACHE, RunFolder, find_run, new_run
from launch.worker import Job, threads_of
from suite.data.prepare import folder_of, prepare
from suite.errors import CheckpointError, DataError, SettingError
from suite.pipeline.layers import count_parameters


def start(name: str, scale: Asked, settings: str, launcher: str, console: Console) -> None:
    """Runs an experiment from nothing. Raises a SuiteError for whatever the user can mend."""
    find(name)  # an unknown name is told before anything is looked for
    machine = this_machine()
    chosen, shrunk = resolve(name, scale, machine, settings)
    if os.environ.get("RAY_ADDRESS"):
        console.print("RAY_ADDRESS is set: the scale is chosen by this machine's devices, not by that cluster's")
    console.print(shrunk)
    corpus = prepare(chosen.text, CACHE, _say(console)).corpus
    if corpus != chosen.text.corpus:
        chosen = chosen.model_copy(update={"text": chosen.text.model_copy(update={"corpus": corpus})})
        chosen = with_changes(find(name), chosen)
    _train(
        Job(new_run(name).path, _text_folder(chosen), machine.kind == "gpu", resume=False), chosen, launcher, console
    )


def resume(asked: str, settings: str, launcher: str, console: Console) -> None:
    """Takes a run up again. Raises SettingError for an unknown run, CheckpointError when it is finished already."""
    run = find_run(asked)
    before = Experiment.from_toml(run.experiment.read_text())
    chosen = before.with_settings(settings)
    changed = [section for section in ("model", "text") if getattr(chosen, section) != getattr(before, section)]
    if chosen.optimizer.name != before.optimizer.name:
        changed.append("optimizer.name")
    if changed:
        raise SettingError(f"a resumed run keeps its {' and '.join(changed)}; start a new run to change them")
    if run.record.exists() and json.loads(run.record.read_text())["steps"] >= chosen.train.steps:
        raise CheckpointError(
            f"run {run.path} has done all its {chosen.train.steps} steps; "
            f'to train on, SET="train.steps={2 * chosen.train.steps}"'
        )
    text = prepare(chosen.text, CACHE, _say(console))
    if text.corpus != chosen.text.corpus:
        raise DataError(
            f"run {run.path} was trained on {chosen.text.corpus}, which cannot be had now; it is not taken up on "
            f"{text.corpus}. Restore the cache or the network and resume again"
        )
    _train(Job(run.path, _text_folder(chosen), this_machine().kind == "gpu", resume=True), chosen, launcher, console)


def _text_folder(chosen: Experiment) -> Path:
    return folder_of(chosen.text, CACHE).resolve()


def _train(job: Job, chosen: Experiment, launcher: str, console: Console) -> None:
    lock = filelock.FileLock(job.folder / "lock")
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        raise SettingError(f"another process is at run {job.folder}; wait until it ends, or end it") from None
    with held:
        try:
            _announce(job.run, chosen, console)
            _launch(job, chosen, launcher, console)
        except KeyboardInterrupt:
            console.print(f"interrupted; the workers are gone. Go on with: make resume RUN={job.folder}")
            raise
    _summarise(job.run, console)


def _launch(job: Job, chosen: Experiment, launcher: str, console: Console) -> None:
    """Runs the workers to the end. What was resolved becomes the run's record of itself only once they are placed:
    a resume that cannot start leaves the old one."""
    draft = job.run.experiment.with_suffix(".draft")
    draft.write_text(chosen.to_toml())
    if not job.resume:
        draft.rename(job.run.experiment)
    with Follower(job.run, chosen.train.steps, console):
        if launcher == "ray":
            from launch import ray_train

            ray_train.run(job, chosen)
        else:
            from launch import spawn

            spawn.run(job, chosen)


def _announce(run: RunFolder, chosen: Experiment, console: Console) -> None:
    """Prints and keeps what will run where."""
    layers, _ = chosen.build()
    pipeline = chosen.pipeline
    workers, threads = pipeline.stages * pipeline.replicas, threads_of(chosen)
    lines = [
        f"{chosen.name} at scale {chosen.scale}: {len(layers)} layers, {count_parameters(layers):,} parameters, "
        f"K = {pipeline.stages}, R = {pipeline.replicas}, M = {pipeline.micro_batches}, remat {pipeline.remat}; "
        f"{chosen.train.steps} steps of about {chosen.train.batch_tokens:,} target tokens; "
        f"{workers} workers, {threads} threads each"
    ]
    if workers > cores() and chosen.scale != "paper":
        lines.append(f"{workers} workers share {cores()} cores and take turns")
    for k, cell in enumerate(chosen.cells(layers)):
        parameters = sum(p.numel() for index in cell for p in layers[index].parameters())
        lines.append(f"  stage {k}: layers {cell[0]}-{cell[-1]} ({len(cell)}), {parameters:,} parameters")
    lines.append(f"folder: {run.path}")
    run.plan.write_text("\n".join(lines) + "\n")
    for line in lines:
        console.print(line)


def _summarise(run: RunFolder, console: Console) -> None:
    record = json.loads(run.record.read_text())
    gain = record["baseline_nll"] - record["valid_nll"]
    lines = [
        f"done: {record['steps']} steps, {record['tokens']:,} target tokens in {record['seconds']:.0f} s "
        f"({record['tokens_per_second']:,.0f} tokens/s, {record['threads']} threads a worker)",
        f"loss {record['loss_first']:.3f} -> {record['loss_last']:.3f}",
        f"validation: {record['valid_nll']:.3f} nats a token; the best predictor without context: "
        f"{record['baseline_nll']:.3f} (unigram entropy of the same tokens); {_compare(gain)}",
        f"peak memory of all workers: {record['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"wandb run: {record['wandb_run'] or 'none'}",
        f"folder: {run.path}",
    ]
    for line in lines:
        console.print(line)


def _compare(gain: float) -> str:
    return f"{gain:.3f} below it" if gain > 0 else f"{-gain:.3f} above it: nothing was learned beyond frequencies"


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text)
