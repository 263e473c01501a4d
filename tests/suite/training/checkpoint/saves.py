"""Real saves of a toy stage that cost nothing to compute: every number of the state is the step it belongs to."""

import multiprocessing as mp
import random
import re
import resource
import tempfile
import time

import torch

from launch.backends.processes import modules_to_preload
from suite.pipeline.model.topology import RankCoord
from suite.settings import OptimizerSettings
from suite.training.checkpoint import Saver, Storage, current, list_checkpoints, newest_valid
from suite.training.stage_optimizer import StageOptimizer
from tests.suite.pipeline.build import build, join
from tests.suite.pipeline.toy import SumLoss, toy_layers

LAYERS = len(toy_layers())


class Counting:
    """One worker whose weights and optimizer state are the number of the step."""

    def __init__(self, rank, world, rendezvous, storage, start=0, log=print, deadline_s=60.0, replicas=1, buffers=()):
        """Layers of the indices ``buffers`` have one, which is the number of the replica."""
        join(rank, world, rendezvous)
        self.coord = RankCoord(rank, world // replicas, replicas)
        layers = toy_layers()
        for index in buffers:
            layers[index].register_buffer("replica", torch.zeros(1, device="meta"))
        executor, ties, named, groups = build(self.coord, layers, SumLoss(), "never")
        settings = OptimizerSettings()
        self.stage, self.groups = executor.stage, groups
        for index in set(buffers) & {*self.stage.indices}:
            self.stage.by_index[index].replica.fill_(self.coord.replica)
        self.update = StageOptimizer(self.stage, len(layers), ties, self.coord, groups, settings)
        self._named = named
        storage = storage if isinstance(storage, Storage) else Storage(storage)
        self.failed, self.progress = [], []
        self.saver = Saver(
            storage, self.update, lambda units: {}, log, start, deadline_s, self.failed.append,
            on_progress=lambda: self.progress.append(time.monotonic()),
        )  # fmt: skip

    @torch.no_grad()
    def become(self, step):
        """Does a step."""
        for key, parameter in self._named.items():
            parameter.fill_(step)
            parts = {name: torch.full_like(parameter, step) for name in ("exp_avg", "exp_avg_sq")}
            self.update.load_state(key, {"step": torch.tensor(float(step)), **parts})
        self.saver.on_step_end(step, True)

    def save(self, *steps, best=False):
        """Does steps and saves each."""
        for step in steps:
            self.become(step)
            self.saver.save(step, 0, best)
            self.saver.wait()


def limit(size):
    """Every write beyond ``size`` bytes of a file fails in this process, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def newest_of(folder, said=lambda text: None, select=current):
    """Returns the checkpoint from which a run would go on, None for none."""
    return newest_valid(folder, range(LAYERS), LAYERS, said, select)


def layer_files(checkpoint):
    """Returns the files of all layers in the folder of a checkpoint, by their names without the id of the save."""
    return {path.name.partition(".")[0]: path for path in sorted(checkpoint.glob("*.safetensors"))}


def layer_path(checkpoint, layer):
    """Returns the file of a layer in the folder of a checkpoint."""
    return layer_files(checkpoint)[f"layer-{layer:04d}"]


def without_save_id(text):
    """Returns a text about layers' files in which every save has the same name for a layer."""
    return re.sub(r"\.\w{12}\.safetensors", ".safetensors", text)


def step_of(found):
    """Returns the step of a checkpoint of ``Counting``, 0 for none; all of its numbers must be that step."""
    if found is None:
        return 0
    assert len(found.manifest.files) == LAYERS
    for layer in range(LAYERS):
        for name, value in found.read(layer).items():  # a damaged file would raise
            assert bool((value == found.step).all()), (found, name)
    return found.step


def restored(folder):
    """Returns the step of the newest whole checkpoint, 0 for none."""
    return step_of(next(iter(list_checkpoints(folder, lambda text: None)), None))


def saving(rank, world, rendezvous, folder, start, done):
    """Saves as fast as it can, and says each step that is surely saved; ends when the other one is gone."""
    one, step = Counting(rank, world, rendezvous, folder, start), start
    while True:
        step += 1
        one.become(step)
        try:
            one.saver.save(step, 0)
        except RuntimeError:
            time.sleep(60)  # its save goes on until it is killed too
        if rank == 0 and step > start + 1:
            done.send(step - 1)


def kill_during_saves(folder, times, seed):
    """Kills two workers at random moments of their saves, ``times`` times; each time restores what they left.

    Returns how often that was the state before the save under way, and the new one. Any other is an assertion's.
    """
    chance, context = random.Random(seed), mp.get_context("forkserver")
    context.set_forkserver_preload(modules_to_preload())
    start, previous, new = 0, 0, 0
    for _ in range(times):
        with tempfile.TemporaryDirectory() as meeting:
            hear, done = context.Pipe(duplex=False)
            workers = [
                context.Process(target=saving, args=(rank, 2, f"file://{meeting}/rendezvous", folder, start, done))
                for rank in range(2)
            ]
            for worker in workers:
                worker.start()
            done.close()
            try:
                assert hear.poll(120), "no save in time"
                time.sleep(chance.uniform(0, 0.1))
                chance.shuffle(workers)
                workers[0].kill()
                time.sleep(chance.choice((0, chance.uniform(0, 0.02))))
            finally:
                for worker in workers:
                    worker.kill()
                    worker.join(30)
            sure = start
            try:
                while hear.poll(0):
                    sure = hear.recv()
            except EOFError:
                pass
        found = restored(folder)
        assert found in (sure, sure + 1), (found, sure)
        previous, new, start = previous + (found == sure), new + (found == sure + 1), found
    return previous, new
