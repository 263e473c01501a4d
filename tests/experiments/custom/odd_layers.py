"""Models of odd layers, by name: each trains as plain PyTorch, or is refused in the sentence that ``REFUSED`` has."""

import threading
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from suite import TrainSpec

W = 6
SGD = (
    "optimizer.name=sgd optimizer.beta1=0 optimizer.learning_rate=0.2 optimizer.warmup_steps=1 "
    "optimizer.lr_decay=constant optimizer.max_grad_norm=none tracking.wandb=disabled train.threads=1"
)


def rows(count=8):
    x = torch.randn(count, W, generator=torch.Generator().manual_seed(2))
    return x, x[:, :3].argmax(1)


def spec(*layers, train=None, loss=None, **more):
    return TrainSpec(
        layers=list(layers), loss=loss or nn.CrossEntropyLoss(), train=lambda step: train or rows(), batch_size=8,
        stages=2, micro_batches=2, steps=2, settings=SGD, **more,
    )  # fmt: skip


def linears():
    torch.manual_seed(0)
    return [nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.Tanh(), nn.Linear(W, 3)]


class Wrapped(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inner, self.run = nn.Linear(W, W), run

    def forward(self, x):
        return self.run(self.inner(x))


def with_layer(layer):
    torch.manual_seed(0)
    return spec(nn.Linear(W, W), layer, nn.Linear(W, 3))


def hooked_gradient():
    layers = linears()
    layers[2].weight.register_hook(lambda gradient: gradient * 0.1)
    return spec(*layers)


def clipping_hook():
    layers = linears()
    layers[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return spec(*layers)


def hook_after_accumulation():
    layers = linears()
    layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))
    return spec(*layers)


def marked_parameter():
    layers = linears()
    layers[2].weight.slow = True

    def groups(name, parameter):
        return (0.1 if getattr(parameter, "slow", False) else 1.0), 1.0

    return spec(*layers, param_groups=groups)


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def own_class():
    torch.manual_seed(0)
    layer = nn.Linear(W, W)
    layer.weight = Scaled(layer.weight.detach())
    return spec(nn.Linear(W, W), layer, nn.Linear(W, 3), param_groups=lambda _, p: (2.0 * isinstance(p, Scaled), 1.0))


def one_memory():
    layers = linears()
    layers[2].weight.data = layers[0].weight.data
    return spec(*layers)


def memory_with_offset():
    layers, flat = linears(), torch.randn(2 * W * W)
    layers[0].weight.data, layers[2].weight.data = flat[: W * W].view(W, W), flat[W * W :].view(W, W)
    return spec(*layers)


def overlapping_memory():
    layers, flat = linears(), torch.randn(W * W + 1)
    layers[0].weight.data, layers[2].weight.data = flat[:-1].view(W, W), flat[1:].view(W, W)
    return spec(*layers)


class Hides(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.inner = [table], nn.Linear(W, W)

    def forward(self, x):
        return self.inner(x) @ self.table[0].weight


def hidden_module():
    torch.manual_seed(0)
    table = nn.Linear(W, W, bias=False)
    return spec(table, Hides(table), nn.Linear(W, 3))


def frozen_teacher():
    torch.manual_seed(0)
    return spec(nn.Linear(W, W), Hides(nn.Linear(W, W).requires_grad_(False)), nn.Linear(W, 3))


def closure():
    torch.manual_seed(0)
    layer = Wrapped(None)
    layer.run = lambda x: x * layer.inner.weight.sum()
    return spec(nn.Linear(W, W), layer, nn.Linear(W, 3))


def closure_of_a_hook():
    layers = linears()
    other = layers[0]
    layers[2].register_forward_hook(lambda module, inputs, output: output + other.bias)
    return spec(*layers)


TABLE = nn.Linear(W, W, bias=False)


class ReadsGlobal(nn.Module):
    def forward(self, x):
        return x @ TABLE.weight


def global_module():
    torch.manual_seed(0)
    return spec(TABLE, ReadsGlobal(), nn.Linear(W, 3))


def patched_forward():
    layers = linears()
    other = layers[0]
    layers[2].forward = MethodType(lambda self, x: x @ other.weight, layers[2])
    return spec(*layers)


def local_class():
    layers = linears()
    table = layers[0]

    class Local(nn.Module):
        def forward(self, x):
            return x @ table.weight

    return spec(layers[0], Local(), layers[-1])


def reads_global_by_helper(x):
    return x @ TABLE.weight


class CallsHelper(nn.Module):
    def forward(self, x):
        return reads_global_by_helper(x)


def global_in_a_helper():
    return spec(TABLE, CallsHelper(), nn.Linear(W, 3))


class Named(nn.Module):
    """Its attribute has the name of a global module."""

    def __init__(self):
        super().__init__()
        self.TABLE = nn.Linear(W, W)

    def forward(self, x):
        return self.TABLE(x)


def attribute_like_a_global():
    return with_layer(Named())


def loss_with_a_layer():
    layers = linears()

    def loss(scores, labels):
        return nn.functional.cross_entropy(scores, labels) + layers[0].weight.abs().sum()

    return spec(*layers, loss=loss)


def bounded_hook():
    layers = linears()
    layers[2].weight.register_hook(lambda gradient: gradient.clamp(-20, 20))
    return spec(*layers)


def large_hook():
    layers = linears()
    layers[2].weight.register_hook(lambda gradient: gradient * 0.001 * 1000)
    return spec(*layers)


def frozen_hook():
    layers = linears()
    layers[2].weight.register_hook(lambda gradient: gradient * 2)
    layers[2].weight.requires_grad_(False)
    return spec(*layers)


def shared_norm():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(1)
    return spec(
        nn.Unflatten(1, (1, 1, W)), nn.Sequential(norm), nn.Sequential(norm, nn.Flatten()), nn.Linear(W, 3)
    )  # fmt: skip


def meta_tied():
    with torch.device("meta"):
        first, last = nn.Linear(W, W), nn.Linear(W, W)
        last.weight = first.weight
        return spec(first, nn.Tanh(), last, nn.Tanh(), nn.Linear(W, 3))


def hook_that_uses_its_module():
    layers = linears()
    layers[2].register_forward_hook(lambda module, inputs, output: output * module.weight.sum())
    return spec(*layers)


def partial_function():
    torch.manual_seed(0)
    weight = torch.randn(W, W)
    return with_layer(Wrapped(partial(nn.functional.linear, weight=weight)))


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.mask = nn.Linear(W, W), {"mask": [torch.arange(float(W))]}

    def forward(self, x):
        return self.inner(x) * self.mask["mask"][0]


def constant_tensor():
    return with_layer(Masks())


class KeepsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(W, W), None

    def forward(self, x):
        self.last = self.inner(x)
        return self.last


def kept_output():
    return with_layer(KeepsOutput())


class LazyTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(W, W), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(1.0, W + 1, device=x.device)
        return self.inner(x) * self.table


def lazy_table():
    return with_layer(LazyTable())


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(W, W)
        self.register_buffer("a", torch.ones(1))
        self.register_buffer("b", self.a)

    def forward(self, x):
        return self.inner(x) * self.b


def buffer_of_two_names():
    return with_layer(TwoNames())


def weight_norm():
    return with_layer(parametrizations.weight_norm(nn.Linear(W, W)))


def old_weight_norm():
    return with_layer(nn.utils.weight_norm(nn.Linear(W, W)))


def spectral_norm():
    return with_layer(parametrizations.spectral_norm(nn.Linear(W, W)))


def old_spectral_norm():
    return with_layer(nn.utils.spectral_norm(nn.Linear(W, W)))


def pruned():
    return with_layer(prune.random_unstructured(nn.Linear(W, W), "weight", 0.5))


class OwnNames(nn.Module):
    """Attributes with names that the suite once read."""

    def __init__(self, table):
        super().__init__()
        self.weight, self.tied, self.pops, self.stashes = table.weight, True, 3, "none"
        self.grad_queue, self.layer_structure = [], object
        self.score = nn.Linear(W, 3)

    def forward(self, x):
        return self.score(nn.functional.linear(x, self.weight))


def own_names():
    torch.manual_seed(0)
    table = nn.Linear(W, W, bias=False)
    return spec(table, nn.Tanh(), OwnNames(table))


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, W)
        self.register_buffer("ids", torch.arange(W), persistent=False)

    def forward(self, x):
        return x + self.table(self.ids.clamp(0, 7)).sum(0)


def meta_integers():
    with torch.device("meta"):
        return spec(nn.Linear(W, W), Places(), nn.Linear(W, 3))


class Tangent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(W, W)

    def forward(self, x):
        return torch.func.jvp(lambda y: torch.tanh(self.inner(y)), (x,), (torch.ones_like(x),))[1]


def tangent():
    return with_layer(Tangent())


class Off(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.off = nn.Linear(W, W), nn.Linear(W, 0, bias=False)

    def forward(self, x):
        return torch.cat([self.main(x), self.off(x)], -1)


def empty_parameter():
    return with_layer(Off())


class Transposed(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.weight = table.weight.t()

    def forward(self, x):
        return x @ self.weight


def computed_before():
    torch.manual_seed(0)
    table = nn.Linear(W, W)
    return spec(table, Transposed(table), nn.Linear(W, 3))


class Counts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x):
        self.count.add_(1)
        return x * self.count.sum()


def overlapping_buffers():
    memory = torch.zeros(4)
    return spec(nn.Linear(W, W), Counts(memory[:3]), Counts(memory[2:]), nn.Linear(W, 3))


def buffer_of_equal_layers():
    memory = torch.zeros(4)
    return spec(nn.Linear(W, W), Counts(torch.zeros(4)), Counts(memory), Counts(memory), nn.Linear(W, 3))


def view_of_a_buffer():
    made = Counts(torch.zeros(4))
    made.last = made.count[3:]
    return spec(nn.Linear(W, W), made, nn.Linear(W, 3))


class Detaches(nn.Module):
    def forward(self, x):
        return x.detach()


def nothing_trained():
    return spec(nn.Linear(W, 3), Detaches())


def constant_on_meta():
    torch.manual_seed(0)
    layer = nn.Linear(W, W)
    layer.table = torch.empty(3, device="meta")
    return with_layer(layer)


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(W, W)
        self.lock = threading.Lock()


def lock():
    return with_layer(Locked())


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("not twice")


def uncopied():
    return with_layer(Uncopied(W, W))


def everything():
    """Most of what trains, in one model."""
    made = [make() for make in TRAINED if make not in (own_names, spectral_norm, old_spectral_norm)]
    first, *last = own_names().layers
    return spec(
        first,
        *(layer for one in made for layer in one.layers[:-1]),
        *last,
        param_groups=marked_parameter().param_groups,
    )


TRAINED = (
    hooked_gradient, marked_parameter, own_class, memory_with_offset, frozen_teacher, hook_that_uses_its_module,
    partial_function, constant_tensor, kept_output, lazy_table, buffer_of_two_names, weight_norm, old_weight_norm,
    spectral_norm, old_spectral_norm, pruned, own_names, tangent, empty_parameter, attribute_like_a_global, large_hook,
    frozen_hook, meta_tied,
)  # fmt: skip

REFUSED = {
    clipping_hook: "layer 2 (Linear) has a hook on weight that is not linear in the gradient",
    hook_after_accumulation: "layer 0 (Linear) has a hook on weight after its gradient is accumulated",
    one_memory: "weight of layer 0 and weight of layer 2 are two tensors over one memory",
    overlapping_memory: "weight of layer 0 and weight of layer 2 are two tensors over one memory",
    hidden_module: "layer 1 (Hides) holds the Linear of layer 0 in table[0] without registering it",
    closure: "layer 1 (Wrapped) uses a Wrapped by layer in a function of run",
    closure_of_a_hook: "layer 2 (Linear) uses a Linear by other in a function of _forward_hooks",
    global_module: "layer 1 (ReadsGlobal) uses a Linear by the global TABLE",
    patched_forward: "layer 2 (Linear) uses a Linear by other in a function of forward",
    local_class: "layer 1 (Local) uses a Linear by table in a function",
    global_in_a_helper: "layer 1 (CallsHelper) uses a Linear by the global TABLE",
    loss_with_a_layer: "loss uses the Linear of layer 0 by layers in a function[0]",
    bounded_hook: "layer 2 (Linear) has a hook on weight that is not linear in the gradient",
    shared_norm: "layer 1 (Sequential) changes its buffer 0.running_mean, whose memory another tensor has too",
    overlapping_buffers: "layer 1 (Counts) changes its buffer count, whose memory another tensor has too",
    buffer_of_equal_layers: "layer 2 (Counts) changes its buffer count, whose memory another tensor has too",
    view_of_a_buffer: "layer 1 (Counts) changes its buffer count, whose memory another tensor has too",
    nothing_trained: "nothing that the last layer returns depends on a trained parameter",
    computed_before: "layer 1 (Transposed) holds in weight a tensor that was computed from parameters",
    constant_on_meta: "layer 1: its table is on the meta device, and others of its tensors are not; give it values",
    meta_integers: "layer 1 (Places): its ids has no values",
    lock: "layer 1: a Locked cannot be copied (TypeError: cannot pickle '_thread.lock' object)",
    uncopied: "layer 1: a Uncopied cannot be copied (RuntimeError: not twice)",
}
"""What the refusal says."""
