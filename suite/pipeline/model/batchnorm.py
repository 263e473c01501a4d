"""BatchNorm in a pipeline: normalised per micro-batch, with running statistics of the whole mini-batch.

    micro-batch 0   x -> mean, variance of its own values ---> normalised
    micro-batch 1   x -> mean, variance ---------------------> normalised
    ...                  \\ count, mean, sum of squares: recorded
    end of step           all of them, of all replicas, merged -> one update of the running stats

Section 2.3 of the paper. A recompute overwrites its micro-batch's record with the same numbers, so nothing counts twice
and the running statistics depend neither on K nor on remat. Merging adds squares of differences from the merged mean
(Chan et al., 1979), never a difference of large sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.model.topology import Group

Moments = tuple[float, Tensor, Tensor]
"""Count of values per channel, their mean, and the sum of squared differences from it; fp64, (channels)."""


class MicroBatchNorm(nn.BatchNorm2d):
    """A BatchNorm that records each micro-batch's moments; torch's own would update its running statistics at once."""

    recorded: dict[int, tuple[int, Tensor, Tensor]]
    """Count, mean and unbiased variance of each micro-batch of this mini-batch."""
    micro_batch: int
    running_mean: Tensor
    running_var: Tensor
    momentum: float

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width), normalised by its own moments in training, else by running statistics."""
        if not self.training:
            return super().forward(x)
        # with a momentum of 1 torch writes the micro-batch's mean and unbiased variance to these buffers
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        normalised = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self.recorded[self.micro_batch] = x.numel() // x.shape[1], mean, variance
        return normalised

    def moments(self) -> Moments:
        """Returns the merged moments of all micro-batches, in their order; a count of zero without any."""
        if not self.recorded:  # a replica without a micro-batch
            zeros = torch.zeros_like(self.running_mean, dtype=torch.float64)
            return 0, zeros, zeros
        counts, means, variances = zip(*(self.recorded[i] for i in sorted(self.recorded)), strict=True)
        squares = torch.stack(variances).double() * _column(counts, means[0]).sub_(1)
        return merge(counts, torch.stack(means).double(), squares)


def by_micro_batch(layer: nn.Module) -> nn.Module:
    """Returns the layer after making each BatchNorm2d in it a MicroBatchNorm of the same values.

    Raises SettingError for a norm whose running statistics every micro-batch would update, a recompute twice.
    """
    for module in layer.modules():
        if type(module) is nn.BatchNorm2d and module.momentum is not None and module.track_running_stats:
            module.__class__ = MicroBatchNorm
            norm = cast(MicroBatchNorm, module)
            norm.recorded, norm.micro_batch = {}, 0
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, MicroBatchNorm):
            raise SettingError(
                f"{module} does not work with micro-batches; use BatchNorm2d with a momentum and running statistics"
            )
    return layer


def recorded_bytes(layer: nn.Module) -> int:
    """Returns the bytes that a layer's norms record of each micro-batch: mean and variance per channel, in fp32."""
    return sum(8 * module.num_features for module in layer.modules() if isinstance(module, nn.BatchNorm2d))


def merge(counts: Sequence[float], means: Tensor, squares: Tensor) -> Moments:
    """Returns the moments of all values; ``means`` and ``squares`` are (parts, channels)."""
    total, share = sum(counts), _column(counts, means)
    mean = (means * (share / total)).sum(0)
    return total, mean, (squares + (means - mean).square() * share).sum(0)


def _column(counts: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64).to(like.device, non_blocking=True).unsqueeze(1)


class RunningStats:
    """The running statistics of all BatchNorms of one stage."""

    def __init__(self, layers: nn.Module) -> None:
        self._norms = [module for module in layers.modules() if isinstance(module, MicroBatchNorm)]

    def begin(self, micro_batch: int) -> None:
        """Sets the micro-batch, counted over the whole mini-batch, of the next forward."""
        for norm in self._norms:
            norm.micro_batch = micro_batch

    @torch.no_grad()
    def update(self, applied: bool, replicas: Group | None = None) -> None:
        """Ends a mini-batch: updates the running statistics if its update was ``applied``, and clears its moments.

        With ``replicas`` the moments are merged over all replicas; otherwise only this replica's share counts.
        """
        if applied and self._norms:
            merged = [norm.moments() for norm in self._norms]
            if replicas is not None:
                merged = _over_replicas(merged, replicas)
            for norm, (count, mean, squares) in zip(self._norms, merged, strict=True):
                if not count:  # not merged over replicas, and this one had no micro-batch
                    continue
                for average, value in ((norm.running_mean, mean), (norm.running_var, squares / max(count - 1, 1))):
                    average.lerp_(value.to(average.dtype), norm.momentum)
        for norm in self._norms:
            norm.recorded = {}


def _over_replicas(own_moments: Sequence[Moments], replicas: Group) -> list[Moments]:
    """Merges each norm's moments over all replicas, with one all-gather."""
    counts = _column([count for count, _, _ in own_moments], own_moments[0][1]).flatten()
    packed = torch.cat([counts, *(part for _, mean, squares in own_moments for part in (mean, squares))])
    shares = [torch.empty_like(packed) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(shares, packed, group=replicas)
    sizes = [len(counts), *(part.numel() for _, *parts in own_moments for part in parts)]
    all_counts, *columns = (
        torch.stack(column) for column in zip(*(share.split(sizes) for share in shares), strict=True)
    )
    counts_by_norm = zip(*all_counts.tolist(), strict=True)  # the only wait of the host
    return [merge(*moments) for moments in zip(counts_by_norm, columns[::2], columns[1::2], strict=True)]
