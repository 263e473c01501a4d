"""A model that sleeps instead of computing, so that more workers than cores run at full speed."""

import time

import torch
from torch import nn

from suite import TrainSpec

ROWS = 64
ROW_MS = (0.20, 0.30, 0.25, 0.15, 0.35, 0.25, 0.20, 0.30, 0.25, 0.20, 0.30, 0.25, 0.15, 0.35, 0.25, 0.25)
"""The forward of a row in each layer; its backward takes twice as long."""


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeps(nn.Linear):
    def __init__(self, row_s):
        super().__init__(16, 16)
        self.row_s = row_s

    def forward(self, x):
        return Sleep.apply(super().forward(x), len(x) * self.row_s)


def sleeps():
    torch.manual_seed(3)
    x = torch.randn(256, 16)
    return TrainSpec(
        layers=[Sleeps(row_ms / 1e3) for row_ms in ROW_MS], loss=nn.MSELoss(), train=list(zip(x, x, strict=True)),
        batch_size=ROWS, steps=20,
    )  # fmt: skip
