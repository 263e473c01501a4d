"""Fingerprints of all tensors of a run's first steps: small records by which two runs are compared bit by bit.

    step, micro-batch, layer      the outputs of its forward and recompute, the state of the random numbers behind it,
                                  the gradients of its inputs and parameters
    step, layer                   the whole gradient of each parameter before clipping, and the parameter and the
                                  buffers afterwards

A fingerprint has a hash of the bits, the norm, and a sketch: each value is added with a random sign to one of 32 sums
(Charikar et al. 2002). The norm of the difference of two sketches estimates that of two tensors, within a fifth mostly.
So neither K nor the schedule matters, and no tensor is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from suite.device import generator_of
from suite.errors import SettingError
from suite.pipeline.model.layers import ties_of
from suite.pipeline.runtime.executor import Executor
from suite.pipeline.runtime.layer_hooks import Place, watch_tensors
from suite.pipeline.schedule.action import Action
from suite.training.jsonl import read_lines, remove_stale, reopen
from suite.training.stage_optimizer import StageOptimizer

FORMAT = 2
"""Version of the files. Raise it when hashes or sketches change: those of two versions cannot be compared."""

SKETCH = 32
"""Sums of a sketch."""

PLACES = 32 * SKETCH
"""The places of the grid in which values are added before the sums."""

PART = 63 << 10
"""Values that are summed at once: few enough for a core's caches, and no usual width of a matrix."""


@dataclass(frozen=True)
class Fingerprint:
    digest: str
    norm: float
    sketch: tuple[float, ...]

    @staticmethod
    def of(tensor: Tensor) -> Fingerprint:
        """Returns the fingerprint of a tensor's values in their order; -0 counts as 0."""
        values = tensor.detach().reshape(-1) + 0.0
        digest = xxhash.xxh3_64_hexdigest(values.cpu().view(torch.uint8).numpy().data)
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        return Fingerprint(digest, float(norm), tuple(_sketch(values).tolist()))

    def distance(self, other: Fingerprint) -> float:
        """Returns about the norm of the difference of two tensors of one shape."""
        return float(sum((a - b) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True))) ** 0.5


def _sketch(values: Tensor) -> Tensor:
    """Returns the sums of a vector's values with their signs. A part of the vector is cut into 32 pieces, one behind
    the other. Value ``i`` of a piece is added to column ``i % 32`` of the piece's row in a grid, and each place of the
    grid to one of the sums."""
    grid = torch.zeros(PLACES, dtype=torch.float64, device=values.device)
    for number, part in enumerate(values.split(PART)):
        signed = part * _signs(number, part.device)[: part.numel()]
        rest = part.numel() % PLACES
        if part.numel() > rest:
            pieces = signed[: part.numel() - rest].view(PLACES // SKETCH, -1, SKETCH)
            grid += pieces.sum(1, dtype=torch.float64).flatten()
        grid[:rest] += signed[part.numel() - rest :]
    return grid.new_zeros(SKETCH).index_add_(0, _sum_of_place(values.device), grid)


@lru_cache(maxsize=1024)  # 64 MiB
def _signs(part: int, device: torch.device) -> Tensor:
    """Returns the random signs of a part's values."""
    generator = torch.Generator().manual_seed(part)
    return (2 * torch.randint(2, (PART,), generator=generator, dtype=torch.int8) - 1).to(device)


@cache
def _sum_of_place(device: torch.device) -> Tensor:
    """Returns the sum of each place of the grid, drawn at random. The seed is that of no signs: numbers drawn from one
    seed would give all values of a sum the same sign."""
    return torch.randint(SKETCH, (PLACES,), generator=torch.Generator().manual_seed(2**31)).to(device)


Key = tuple[int, int | None, int, str]
"""Step, counted from 1; micro-batch in the mini-batch, None for all; layer; what, as ``Place`` has it."""


class FingerprintFile:
    """The fingerprints of one process, a line a step."""

    def __init__(
        self,
        folder: Path,
        name: str,
        start: int,
        layers: Mapping[int, nn.Module],
        types: Mapping[int, str],
        micro_batches: int,
        device: str,
    ) -> None:
        """Writes to ``<name>.jsonl`` in ``folder``, behind step ``start``. ``layers`` are given by their indices, as
        are their ``types`` in the model: a stage may have put others in their place. ``micro_batches`` are those of a
        whole mini-batch."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = reopen(folder / f"{name}.jsonl", start)
        ties = [(index, name, tie) for index, layer in layers.items() for name, tie in ties_of(layer).items()]
        about = {"format": FORMAT, "layers": types, "ties": ties, "micro_batches": micro_batches, "device": device}
        self._file.write({"step": start, **about})
        self._rows: dict[tuple[int | None, int, str], Fingerprint] = {}

    def add(self, micro_batch: int | None, layer: int, what: str, tensor: Tensor) -> None:
        """Adds a tensor to the current step."""
        self._rows[micro_batch, layer, what] = Fingerprint.of(tensor)

    def add_from_layer(
        self, micro_batch: int, place: Place, tensor: Tensor, device: torch.device, prefix: str = ""
    ) -> None:
        """Adds what ``watch_tensors`` has seen, and with the first output the state of the random numbers. A loss of
        parts is left out: their number, and so its rounding, depends on the memory."""
        if place.what.startswith("loss of parts"):
            return
        self.add(micro_batch, place.layer, prefix + place.what, tensor)
        if place.what == "output 0":
            self.add(micro_batch, place.layer, f"{prefix}random state", generator_of(device).get_state())

    def add_buffers(self, layer: int, module: nn.Module) -> None:
        for name, buffer in module.named_buffers():
            self.add(None, layer, f"buffer {name}", buffer)

    def write(self, step: int) -> None:
        """Ends the current step, counted from 1."""
        rows = [[*key, one.digest, one.norm, one.sketch] for key, one in self._rows.items()]
        self._file.write({"step": step, "rows": rows})
        self._rows.clear()


class Fingerprints:
    """Records one worker's first steps. All workers must make the same calls."""

    def __init__(
        self, executor: Executor, optimizer: StageOptimizer, folder: Path, start: int, steps: int, micro_batches: int
    ) -> None:
        """Records ``steps`` steps behind ``start``; the rest is as in ``FingerprintFile``. Removes files of workers
        that the run no longer has."""
        self._executor, self._optimizer, self._steps = executor, optimizer, range(start, start + steps)
        coord, self._stage = executor.coord, executor.stage
        if coord.rank == 0:
            remove_stale(folder, coord.replicas, coord.stages)
        name, device = f"{coord.replica}-{coord.stage}", self._stage.device.type
        layers, types = self._stage.by_index, self._stage.types
        self._file = FingerprintFile(folder, name, start, layers, types, micro_batches, device)
        self._indices: dict[int, int] = {}

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Records the step that is trained and updated in this context."""
        if step not in self._steps:
            yield
            return
        self._optimizer.on_gradients = self._add_gradients
        self._add_parameters("initial")
        with watch_tensors(self._stage.by_index, self._stage.loss, self._add):
            yield
        self._optimizer.on_gradients = None
        self._add_parameters("updated")
        if self._executor.coord.replica == 0:
            for layer, module in self._stage.by_index.items():
                self._file.add_buffers(layer, module)
        self._file.write(step + 1)

    def _add(self, place: Place, tensor: Tensor) -> None:
        action = self._executor.status.action
        if not isinstance(action, Action) or (not place.is_backward and action.kind not in "FR"):
            return  # a layer that recomputes in its own backward
        if action.kind == "I" and place.is_backward and not place.what.startswith("gradient of input"):
            return  # without the part that is deferred
        if action.kind == "F":
            self._indices[action.micro_batch] = self._stage.micro_batch
        micro_batch = self._indices[action.micro_batch]
        prefix = "recomputed " if action.kind == "R" else ""
        self._file.add_from_layer(micro_batch, place, tensor, self._stage.device, prefix)

    def _add_parameters(self, which: str) -> None:
        if self._executor.coord.replica == 0:
            for (layer, name), parameter in self._stage.named_parameters().items():
                self._file.add(None, layer, f"{which} {name}", parameter)

    def _add_gradients(self) -> None:
        for key, parameter in self._stage.named_parameters().items():
            if parameter.requires_grad:
                gradient = self._optimizer.gradient(key)  # all replicas must call it
                if self._executor.coord.replica == 0:
                    self._file.add(None, key[0], f"whole gradient of {key[1]}", gradient)


@dataclass(frozen=True)
class RunFingerprints:
    layers: dict[int, str]
    """The type of each layer."""
    micro_batches: int
    """How many a mini-batch has."""
    tensors: dict[Key, Fingerprint]
    device: str = "cpu"
    """Its type."""
    ties: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """The tie of each tied parameter, by layer and name."""

    def copies_of(self, key: Key) -> list[int]:
        """Returns the other layers with a copy of the parameter whose whole gradient this is."""
        tie = self.ties.get((key[2], key[3].removeprefix("whole gradient of ")))
        return [layer for (layer, _), other in self.ties.items() if other == tie and layer != key[2]]

    @staticmethod
    def read(folder: Path) -> RunFingerprints:
        """Returns what all workers recorded; empty without a record. Raises SettingError for a record of another
        version."""
        layers: dict[int, str] = {}
        tensors: dict[Key, Fingerprint] = {}
        ties: dict[tuple[int, str], str] = {}
        micro_batches, device = 0, "cpu"
        for path in sorted(folder.glob("*.jsonl")):
            for line in read_lines(path):
                if "layers" in line:
                    if line.get("format") != FORMAT:
                        raise SettingError(
                            f"the fingerprints in {folder} are of another version, whose hashes differ; train the run "
                            "again to record them"
                        )
                    layers |= {int(index): name for index, name in line["layers"].items()}
                    ties |= {(layer, name): tie for layer, name, tie in line["ties"]}
                    micro_batches, device = line["micro_batches"], line["device"]
                for micro_batch, layer, what, digest, norm, sketch in line.get("rows", ()):
                    tensors[line["step"], micro_batch, layer, what] = Fingerprint(digest, norm, tuple(sketch))
        return RunFingerprints(layers, micro_batches, tensors, device, ties)
