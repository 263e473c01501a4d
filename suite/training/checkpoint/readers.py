"""The replicas of a stage share the reading of its layers: each file is read once, and sent to the others.

layer       0 1 2 3 4 5
read by     0 1 2 0 1 2      R = 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from suite.pipeline.model.topology import Group, RankCoord


@dataclass(frozen=True)
class Readers:
    """One of these replicas."""

    coord: RankCoord
    group: Group
    """The same stage in all replicas; it carries tensors of the host."""

    def own(self, layers: Sequence[int]) -> Sequence[int]:
        """Returns the layers that this replica reads."""
        return layers[self.coord.replica :: self.coord.replicas]

    def exchange(self, sizes: Mapping[int, int], files: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Sends the ``files`` that this replica has read to the others; yields those that others have read, by layer.
        ``sizes`` are the bytes of all layers, in order."""
        for number, (layer, size) in enumerate(sizes.items()):
            reader = self.coord.rank_of(number % self.coord.replicas, self.coord.stage)
            data = torch.frombuffer(bytearray(files.get(layer, size)), dtype=torch.uint8)
            dist.broadcast(data, reader, group=self.group)
            if layer not in files:
                yield layer, data.numpy().tobytes()
