"""Functions that are compiled, with a backend that makes no kernels."""

import threading

import pytest
import torch

from models.loss import TranslationLoss
from suite import device
from suite.device import fused
from suite.errors import PlacementError


class Compiler:
    """Traces as torch's does, and makes no kernels. Keeps the rows' hints of each graph."""

    def __init__(self):
        self.hints, self.compile, self.error = [], torch.compile, None

    def __call__(self, function, **_):
        self.function = function
        return self

    def aot_compile(self, inputs):
        if self.error:
            raise self.error
        self.hints.append(inputs[0][0]._dynamo_hint_overrides)
        return self.compile(self.function, fullgraph=True, backend="eager").aot_compile(inputs)


@pytest.fixture
def compiler(monkeypatch):
    """Compiles on CPUs, too."""
    monkeypatch.setattr(device, "COMPILES", ("cpu",))
    compiler = Compiler()
    monkeypatch.setattr(torch, "compile", compiler)
    return compiler


def doubled(rows, factor, clip, *, weight=1.0):
    return (rows * factor * weight).clamp(max=clip).sum()


def test_one_graph_serves_any_number_of_rows_any_context_and_any_thread(compiler):
    function, found = fused(doubled), []

    def call(rows):
        found.append((function(rows, torch.tensor(2.0), 3.0), doubled(rows.detach(), 2.0, 3.0)))

    with torch.autocast("cpu", torch.bfloat16):
        call(torch.randn(70, 5))
    for count in (20, 300, 2):
        call(torch.randn(count, 5, requires_grad=count > 2))
    with torch.no_grad():
        call(torch.randn(33, 5))
    thread = threading.Thread(target=call, args=(torch.randn(44, 5),))
    thread.start()
    thread.join()
    assert compiler.hints == [{0: 4096}]  # whatever number of rows comes first, so that a resume computes the same
    assert len(found) == 6
    assert all(torch.equal(own, expected) and not own.requires_grad for own, expected in found)


def test_constants_keep_their_shape_where_there_are_as_many_rows(compiler):
    function, weight = fused(doubled), torch.arange(5.0)
    for rows in map(torch.randn, (5, 3, 9), (5, 5, 5)):
        found = function(rows, torch.tensor(2.0), 3.0, weight=weight)
        assert torch.equal(found, doubled(rows, 2.0, 3.0, weight=weight))
    assert len(compiler.hints) == 1


def test_arguments_that_were_one_tensor_may_be_two_later(compiler):
    function, rows, others = fused(lambda a, b: a - b), torch.randn(6, 4), torch.randn(6, 4)
    assert not function(rows, rows).any()
    assert torch.equal(function(rows, others), rows - others)


def test_a_failing_compiler_is_named_with_the_function(compiler):
    compiler.error = RuntimeError("backend='inductor' raised:\nptxas is too old\n\nTraceback")
    with pytest.raises(PlacementError, match=r"compiler failed on .* in doubled: .*ptxas is too old; mend gcc"):
        fused(doubled)(torch.ones(7, 5), torch.tensor(2.0), 3.0)


def test_other_types_widths_strides_and_constants_are_compiled_anew(compiler):
    function, rows = fused(doubled), torch.randn(6, 4)
    function(rows, torch.tensor(2.0), 3.0)
    for of in (rows.double(), rows[:, :3].contiguous(), rows[:, ::2]):
        assert torch.equal(function(of, torch.tensor(2.0), 3.0), doubled(of, 2.0, 3.0))
    function(rows, torch.tensor(2.0), 4.0)
    assert len(compiler.hints) == 5


def test_a_single_row_and_a_device_without_kernels_run_the_function_itself(compiler, monkeypatch):
    function = fused(doubled)
    function(torch.ones(1, 5), torch.tensor(2.0), 3.0)
    monkeypatch.setattr(device, "COMPILES", ("cuda",))
    function(torch.ones(7, 5), torch.tensor(2.0), 3.0)
    assert len(compiler.hints) == 0


def test_without_a_c_compiler_the_error_says_what_to_install(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    with pytest.raises(PlacementError, match="lacks a C compiler"):
        fused(doubled)(torch.ones(7, 5), torch.tensor(2.0), 3.0)


def test_the_loss_has_two_graphs_and_its_sums_and_gradients_are_as_without_a_compiler(compiler):
    loss = TranslationLoss(0.1)

    def found(rows):
        generator = torch.Generator().manual_seed(rows)
        logits = (4 * torch.randn(rows, 11, generator=generator)).requires_grad_()
        labels = torch.randint(0, 11, (rows,), generator=generator)
        objective, metric = loss(logits * 1, labels, 2.0)
        return objective.detach(), metric, torch.autograd.grad(objective, logits)[0]

    compiled = [found(rows) for rows in (30, 8, 50)]
    assert len(compiler.hints) == 2
    device.COMPILES = ()
    assert all(
        torch.equal(own, expected)
        for of_rows, rows in zip(compiled, (30, 8, 50), strict=True)
        for own, expected in zip(of_rows, found(rows), strict=True)
    )
