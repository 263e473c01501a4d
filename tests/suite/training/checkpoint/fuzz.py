"""Reads harmed checkpoints: each must give an error by name or the right state, and nothing else."""

import json
import random
import resource
import shutil
from collections import Counter

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from suite.errors import CheckpointError
from suite.pipeline.model.topology import RankCoord
from suite.settings import OptimizerSettings
from suite.training.checkpoint import audit, load_optimizer, load_values
from suite.training.checkpoint.storage import Storage
from suite.training.stage_optimizer import StageOptimizer
from tests.suite.pipeline.build import build, join
from tests.suite.pipeline.toy import SumLoss, toy_layers
from tests.suite.training.checkpoint.mutations import bytes_harmed, header_harmed, manifest_harmed
from tests.suite.training.checkpoint.saves import LAYERS, layer_path, newest_of
from tests.suite.training.checkpoint.seal import digests, write_sealed

GROWTH_KIB = 200 * 1024


class Reader:
    """One worker that holds the whole toy model and reads checkpoints into it."""

    def __init__(self):
        coord, layers = RankCoord(0, 1, 1), toy_layers()
        executor, ties, _, groups = build(coord, layers, SumLoss(), "never")
        self.stage = executor.stage
        self.update = StageOptimizer(self.stage, len(layers), ties, coord, groups, OptimizerSettings())

    def read(self, folder):
        """Returns (step, tensors by layer) of what a resume would take from a folder, loaded and read back."""
        found = newest_of(folder)
        if found is None:
            return 0, {}
        load_values(found, self.stage)
        load_optimizer(found, self.update)
        held = {}
        for index, layer in enumerate(self.stage.layers):
            tensors = {f"value/{name}": value for name, value in layer.state_dict().items()}
            for name, _ in layer.named_parameters():
                for part, value in self.update.state((index, name)).items():
                    tensors[f"state/{name}/{part}"] = value
            held[index] = tensors
        return found.step, held


def files_of(folder):
    return {index: load_file(layer_path(folder, index)) for index in range(LAYERS)}


def same(one, other):
    return one.keys() == other.keys() and all(
        one[i].keys() == other[i].keys() and all(torch.equal(one[i][name], other[i][name]) for name in one[i])
        for i in one
    )


def fuzz(rank, world, rendezvous, folder, work, times, seed):
    """Harms one file of the newest of two checkpoints, ``times`` times; returns how each ended.

    Half of the harmed files are as a disk would harm them. The other half are sealed again, as only an enemy would:
    then the digests agree, and the parsers meet what no digest has kept from them.
    """
    join(rank, world, rendezvous)
    reader, chance, ends = Reader(), random.Random(seed), Counter()
    old, new = (files_of(path) for path in sorted(folder.glob("0*")))
    assert same(reader.read(folder)[1], new)
    newest = sorted(folder.glob("0*"))[-1].name
    target = shutil.copytree(folder, work / "harmed") / newest
    names = sorted(path.name for path in target.glob("*.*"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        name, sealed = chance.choice(names), chance.random() < 0.5
        whole = (target / name).read_bytes()
        manifest = (target / "manifest.json").read_bytes()
        harm(target, name, sealed, chance)
        try:
            harmed = (target / name).read_bytes() != whole
            step, held = reader.read(target.parent)
            assert isinstance(step, int)
            if not harmed:
                assert same(held, new), (name, "unharmed")
                ends["unharmed"] += 1
            elif not sealed:
                assert same(held, old), (name, "a harmed file was taken")
                ends["the one before"] += 1
            else:  # what an enemy wrote and sealed is of this model, or the one before was taken
                assert same(held, old) or same(held, files_of(target)), name
                ends["of this model"] += 1
        except CheckpointError:
            if not sealed:  # without an enemy there is the one before
                raise
            ends["refused by name"] += 1
        list(audit(Storage(target.parent)))  # says what is wrong, raises nothing
        (target / name).write_bytes(whole)
        (target / "manifest.json").write_bytes(manifest)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < GROWTH_KIB, f"{growth} KiB"
    dist.destroy_process_group()
    return dict(ends)


def harm(target, name, sealed, chance):
    """Harms a file; with ``sealed`` the manifest's digests are made to agree with it."""
    path = target / name
    data = path.read_bytes()
    if not sealed:
        path.write_bytes(bytes_harmed(data, chance))
        return
    values = json.loads((target / "manifest.json").read_bytes())
    del values["seal"]
    if name == "manifest.json":
        values = manifest_harmed(values, chance)
    else:
        data = (header_harmed if chance.random() < 0.7 else bytes_harmed)(data, chance)
        path.write_bytes(data)
        values["files"][name] = digests(data)
    write_sealed(target, values)
