"""Estimates for GPUs: what autocast, dropout and fused functions do otherwise there."""

from dataclasses import replace

from torch import nn

from models.fused_norm import LayerNorm as FusedLayerNorm
from suite.pipeline.planning.estimate import CudaDropout
from tests.suite.pipeline.planning.test_estimate import BF16, PRODUCTS, TRAFFIC, Product, Through, estimated, rows
from tests.suite.pipeline.toy import SquareLoss


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.product = norm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.product(self.norm(x))


def of_normed(norm, device, *optimizer):
    return estimated(
        lambda: [Product(64, 64), Normed(norm), Through()], SquareLoss(), rows(16, 64), device, *optimizer
    )[1]


def test_on_cuda_devices_autocast_keeps_an_fp32_copy_of_what_torchs_norm_reads():
    """Mean and deviation of a row are fp32 too. A fused norm keeps those alone."""
    cuda = replace(PRODUCTS, is_cuda=True)
    plain = of_normed(nn.LayerNorm, PRODUCTS, BF16).activation_bytes
    assert of_normed(nn.LayerNorm, cuda, BF16).activation_bytes - plain == 16 * (4 * 64 + 2 * 2)
    assert of_normed(FusedLayerNorm, cuda, BF16).activation_bytes - plain == 16 * 2 * 2
    for norm in (nn.LayerNorm, FusedLayerNorm):
        on_host, on_cuda = (of_normed(norm, device).activation_bytes for device in (PRODUCTS, cuda))
        assert on_cuda == on_host


def test_a_fused_norm_is_one_kernel_that_reads_and_writes_each_tensor_once():
    """A row of 64 bf16 values is read and written, with a mean and a deviation in fp32; then the product."""
    traffic = replace(TRAFFIC, is_cuda=True)
    product = estimated(lambda: [Product(64, 64)] * 2 + [Through()], SquareLoss(), rows(16, 64), traffic, BF16)[1]
    found = of_normed(FusedLayerNorm, traffic, BF16)
    assert found.forward_s - product.forward_s == 16 * (2 * 64 + 2 * 64 + 2 * 4) + 2 * 4 * 64


def test_a_mask_of_cudas_dropout_has_a_byte_for_each_value():
    data, values = rows(8, 4), 8 * 4
    wide = estimated(lambda: [Product(4, 4), nn.Dropout(0.1), Through()], SquareLoss(), data)
    with CudaDropout():
        narrow = estimated(lambda: [Product(4, 4), nn.Dropout(0.1), Through()], SquareLoss(), data)
    assert [cost.activation_bytes for cost in wide[:2]] == [4 * values, (4 + 4) * values]
    assert [cost.activation_bytes for cost in narrow[:2]] == [4 * values, (4 + 1) * values]
