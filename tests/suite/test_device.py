"""Functions that are compiled, with the compiler's own backend that makes no kernels."""

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from models.loss import TranslationLoss
from suite import device
from suite.device import fused
from suite.errors import PlacementError


@pytest.fixture
def counter(monkeypatch):
    """Counts the graphs that are compiled, on CPUs too."""
    monkeypatch.setattr(device, "COMPILES", ("cpu",))
    counter, compile_it = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_it(function, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def doubled(rows, factor, clip, *, weight=1.0):
    return (rows * factor * weight).clamp(max=clip).sum()


def test_one_graph_serves_any_number_of_rows_any_context_and_any_thread(counter):
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
    assert counter.frame_count == 1
    assert len(found) == 6
    assert all(torch.equal(own, expected) and not own.requires_grad for own, expected in found)


def test_constants_keep_their_shape_where_there_are_as_many_rows(counter):
    function, weight = fused(doubled), torch.arange(5.0)
    for rows in map(torch.randn, (5, 3, 9), (5, 5, 5)):
        found = function(rows, torch.tensor(2.0), 3.0, weight=weight)
        assert torch.equal(found, doubled(rows, 2.0, 3.0, weight=weight))
    assert counter.frame_count == 1


def test_kernels_are_chosen_for_a_number_of_rows_that_no_run_changes(counter, monkeypatch):
    hints, compile_graph = [], counter.__class__.__call__

    def note(self, graph, inputs):
        hints.append(torch._guards.TracingContext.get().fake_mode.shape_env.var_to_hint_override)
        return compile_graph(self, graph, inputs)

    monkeypatch.setattr(counter.__class__, "__call__", note)
    fused(doubled)(torch.randn(70, 5), torch.tensor(2.0), 3.0)
    assert [set(by_symbol.values()) for by_symbol in hints] == [{4096}]


def test_a_failing_compiler_is_named_with_the_function(counter, monkeypatch):
    def fail(*_):
        raise ValueError("ptxas is too old")

    monkeypatch.setattr(counter.__class__, "__call__", fail)
    with pytest.raises(PlacementError, match=r"compiler failed on .* in doubled: .*ptxas is too old"):
        fused(doubled)(torch.ones(7, 5), torch.tensor(2.0), 3.0)


def test_a_single_row_and_a_device_without_kernels_run_the_function_itself(counter, monkeypatch):
    function = fused(doubled)
    function(torch.ones(1, 5), torch.tensor(2.0), 3.0)
    monkeypatch.setattr(device, "COMPILES", ("cuda",))
    function(torch.ones(7, 5), torch.tensor(2.0), 3.0)
    assert counter.frame_count == 0


def test_without_a_c_compiler_the_error_says_what_to_install(counter, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "")
    with pytest.raises(PlacementError, match="lacks a C compiler"):
        fused(doubled)(torch.ones(7, 5), torch.tensor(2.0), 3.0)


def test_the_loss_has_two_graphs_and_its_sums_and_gradients_are_as_without_a_compiler(counter):
    loss = TranslationLoss(0.1)

    def found(rows):
        generator = torch.Generator().manual_seed(rows)
        logits = (4 * torch.randn(rows, 11, generator=generator)).requires_grad_()
        labels = torch.randint(0, 11, (rows,), generator=generator)
        objective, metric = loss(logits * 1, labels, 2.0)
        return objective.detach(), metric, torch.autograd.grad(objective, logits)[0]

    compiled = [found(rows) for rows in (30, 8, 50)]
    assert counter.frame_count == 2
    device.COMPILES = ()
    assert all(
        torch.equal(own, expected)
        for of_rows, rows in zip(compiled, (30, 8, 50), strict=True)
        for own, expected in zip(of_rows, found(rows), strict=True)
    )
