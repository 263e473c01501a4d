"""A training run of your own: a list of layers, a loss and data. docs/own-model.md explains it by examples.

    def digits() -> TrainSpec:
        return TrainSpec(layers=nn.Sequential(...), loss=nn.CrossEntropyLoss(), train=dataset, batch_size=64, stages=2)

    gpipe experiment my_run.py:digits --set "pipeline.stages=4"

The suite cuts the layers into K stages and each mini-batch into R x M micro-batches. Neither changes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the command line imports this package and must not wait for torch
    from torch import Tensor, nn

    Batch = tuple[Tensor | tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]
    """Inputs of the first layer and targets of the loss: each one tensor or several. All have the rows of the
    mini-batch as their first axis."""


class Dataset(Protocol):
    """A map-style dataset, such as ``torch.utils.data.TensorDataset``: rows by index."""

    def __len__(self) -> int:
        """The number of rows."""

    def __getitem__(self, index: int, /) -> Any:
        """Returns a row: (inputs, targets), each one tensor or number, or a tuple of them."""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What to train, on what, and for how long. The numbers are defaults of settings: ``SET=`` changes them.

    layers: A list of modules, or one ``nn.Sequential``. Each takes what the previous one returns: one tensor or a
        tuple of tensors. Layers on the meta device are initialised by their ``reset_parameters``, each on its own
        stage.
    loss: ``loss(*outputs, *targets)``: a mean over the units of a micro-batch, which are rows unless ``units`` says
        otherwise. A loss of torch with ``reduction="sum"`` returns the sum over the units instead.
    train: Training data: a dataset, which is shuffled in each epoch, or a function that returns the mini-batch of a
        step, the same whenever it is called with that step.
    valid: Held-out data, evaluated at the end and every ``train.validate_every`` steps; none: no evaluation. The
        best validation is the one with the lowest loss.
    metric: ``metric(*outputs, *targets)``: another mean over the units, reported beside the loss by the name
        of the function, or as ``metric`` if that is a lambda; a dict has several by name.
    units: ``units(*targets)``: what the loss's mean is over, such as the number of tokens that are not padding.
        None: the rows; for cross entropy with an ``ignore_index`` or class weights, the sum of weights of its
        targets.
    on_step: ``on_step(step, metrics)`` is called after each step, and again after a validation, on the one worker
        that writes the metrics, with what it writes (docs/metrics.md). All workers wait for it, a minute at most. An
        exception in it ends the run.
    param_groups: ``param_groups(name, parameter)``: the factors of the learning rate and of the weight decay of a
        parameter, such as ``3.weight``; none: 1 and 1. ``parameter`` says dimensions and shape; its values may be any.
    collate: Makes one mini-batch of a list of a dataset's rows; none: ``torch.utils.data.default_collate``.
    prefetch: Whether a thread, or processes beside a GPU, read the next mini-batches while this one trains. Only
        for data that draws no random numbers from the generators of torch, numpy and ``random``: they are not
        seeded for it, and layers use them at the same time. Each process calls the function that returns the
        ``TrainSpec``.
    batch_size: ``train.batch_rows``: rows of a mini-batch over all replicas.
    stages: ``pipeline.stages``: K.
    micro_batches: ``pipeline.micro_batches``: M, in each replica.
    replicas: ``pipeline.replicas``: R.
    steps: ``train.steps``.
    settings: Any other settings, such as ``"optimizer.learning_rate=3e-4 pipeline.schedule=1f1b"``
        (docs/settings.md).
    """

    layers: Sequence[nn.Module]
    loss: Callable[..., Tensor]
    train: Dataset | Callable[[int], Batch]
    valid: Dataset | None = None
    metric: Callable[..., Tensor] | Mapping[str, Callable[..., Tensor]] | None = None
    units: Callable[..., Tensor | float] | None = None
    on_step: Callable[[int, dict[str, float]], object] | None = None
    param_groups: Callable[[str, nn.Parameter], tuple[float, float]] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    prefetch: bool = False
    batch_size: int = 32
    stages: int = 1
    micro_batches: int = 4
    replicas: int = 1
    steps: int = 100
    settings: str = ""
