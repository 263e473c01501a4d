"""BatchNorm in a pipeline: normalised by each micro-batch, remembered over the whole mini-batch.

    micro-batch 0   x -> mean, variance of its own values ---> normalised
    micro-batch 1   x -> mean, variance ---------------------> normalised
    ...                  \\ count, mean, sum of squares: kept by micro-batch
    end of step           all of them, of all replicas, merged -> one step of the moving averages

Section 2.3 of the paper. A rebuild computes the same numbers again in the same place, so nothing counts twice, and the
moving averages depend neither on K nor on remat. Merging adds squares of differences from the merged mean (Chan et al.,
1979), never a difference of large sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suite.errors import SettingError
from suite.pipeline.topology import Group

Moments = tuple[float, Tensor, Tensor]
"""Count of values a channel, their mean, and the sum of squares of their differences from it; fp64, (channels)."""


class MicroBatchNorm(nn.BatchNorm2d):
    """A BatchNorm that notes each micro-batch's moments where torch's own would move its averages at once."""

    noted: dict[int, tuple[int, Tensor, Tensor]]
    """Count, mean and unbiased variance of each micro-batch of this mini-batch."""
    micro_batch: int

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width), normalised by its own moments in training, by the averages otherwise."""
        if not self.training:
            return super().forward(x)
        # at a momentum of 1 torch leaves the micro-batch's own mean and unbiased variance in the buffers given
        assert self.running_mean is not None
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        normalised = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self.noted[self.micro_batch] = x.numel() // x.shape[1], mean, variance
        return normalised

    def moments(self) -> Moments:
        """Returns those of all micro-batches together, added in their order; of none, a count of zero."""
        if not self.noted:  # a replica without a micro-batch
            assert self.running_mean is not None
            nothing = torch.zeros_like(self.running_mean, dtype=torch.float64)
            return 0, nothing, nothing
        counts, means, variances = zip(*(self.noted[i] for i in sorted(self.noted)), strict=True)
        squares = torch.stack(variances).double() * _column(counts, means[0]).sub_(1)
        return merge(counts, torch.stack(means).double(), squares)


def by_micro_batch(layer: nn.Module) -> nn.Module:
    """Returns the layer with every BatchNorm2d in it made a MicroBatchNorm of the same values.

    Raises SettingError for a norm that would be moved by each micro-batch, and twice by a rebuild, unseen.
    """
    for module in layer.modules():
        if type(module) is nn.BatchNorm2d and module.momentum is not None and module.track_running_stats:
            module.__class__ = MicroBatchNorm
            norm = cast(MicroBatchNorm, module)
            norm.noted, norm.micro_batch = {}, 0
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, MicroBatchNorm):
            raise SettingError(
                f"{module} cannot be kept over micro-batches; use BatchNorm2d with a momentum and moving averages"
            )
    return layer


def noted_bytes(layer: nn.Module) -> int:
    """Returns what the norms of a layer note of each micro-batch: a mean and a variance a channel, in fp32."""
    return sum(8 * module.num_features for module in layer.modules() if isinstance(module, nn.BatchNorm2d))


def merge(counts: Sequence[float], means: Tensor, squares: Tensor) -> Moments:
    """Returns the moments of all values together; (parts, channels) of each part."""
    total, share = sum(counts), _column(counts, means)
    mean = (means * (share / total)).sum(0)
    return total, mean, (squares + (means - mean).square() * share).sum(0)


def _column(counts: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=like.device).unsqueeze(1)


class MovingAverages:
    """The moving averages of all BatchNorms of one stage."""

    def __init__(self, layers: nn.Module) -> None:
        self._norms = [module for module in layers.modules() if isinstance(module, MicroBatchNorm)]

    def begin(self, micro_batch: int) -> None:
        """Says which micro-batch of the whole mini-batch the next values belong to."""
        for norm in self._norms:
            norm.micro_batch = micro_batch

    @torch.no_grad()
    def close(self, applied: bool, replicas: Group | None = None) -> None:
        """Ends a mini-batch: moves the averages towards its moments if its update was ``applied``, and forgets them.

        With ``replicas``, the moments are those of all replicas together, the same on each; else of this one's share.
        """
        merged = [norm.moments() for norm in self._norms if applied]
        if merged and replicas is not None:
            merged = _over_replicas(merged, replicas)
        if merged:
            for norm, (count, mean, squares) in zip(self._norms, merged, strict=True):
                if not count:  # each replica has averages of its own, and this one saw nothing
                    continue
                _move(norm, mean, squares / max(count - 1, 1))
        for norm in self._norms:
            norm.noted = {}


def _move(norm: MicroBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.momentum is not None
    for average, value in ((norm.running_mean, mean), (norm.running_var, variance)):
        average.lerp_(value.to(average.dtype), norm.momentum)


def _over_replicas(mine: Sequence[Moments], replicas: Group) -> list[Moments]:
    """Merges each norm's moments of all replicas, in one message."""
    packed = torch.cat([torch.cat((mean.new_tensor([count]), mean, squares)) for count, mean, squares in mine])
    shares = [torch.empty_like(packed) for _ in range(dist.get_world_size(replicas))]
    dist.all_gather(shares, packed, group=replicas)
    sizes = [1 + 2 * mean.numel() for _, mean, _ in mine]
    columns = zip(*(share.split(sizes) for share in shares), strict=True)
    return [_unpacked(torch.stack(parts)) for parts in columns]


def _unpacked(parts: Tensor) -> Moments:
    means, squares = parts[:, 1:].chunk(2, dim=1)
    return merge(parts[:, 0].tolist(), means, squares)
