"""Parameters that cannot be trained, and what copies of layers would part, with a part of the sentence that says so."""

import threading
import weakref
from types import MethodType

import torch
from torch import nn

from tests.experiments.custom.grammar import Layer, W, hooks_its_weight, layer, layers, one_layer, parameter, production

GLOBAL = nn.Linear(W, W)

# ------------------------------------------------------------------------------------------ parameters


@layer("trains w in float16", w=lambda: nn.Parameter(torch.ones(W).half()))
def trains_fp16(self, x):
    return self.inner(x) * self.w


@layer("has the complex parameter w", w=lambda: nn.Parameter(torch.ones(W, dtype=torch.complex64)))
def trains_complex(self, x):
    return (self.inner(x) * self.w).real


@layer("has the parameter w without an axis", w=lambda: nn.Parameter(torch.tensor(0.5)))
def trains_a_scalar(self, x):
    return self.inner(x) * self.w


@layer("has sparse gradients of table.weight", table=lambda: nn.Embedding(7, W, sparse=True))
def has_sparse_gradients(self, x):
    return self.inner(x) + self.table((x > 0).sum(1))


@layer("is not a number", w=lambda: nn.Parameter(torch.full((W,), torch.nan)))
def has_no_numbers(self, x):
    return self.inner(x) * self.w


@layer("that can be trained", eye=lambda: torch.eye(W).to_sparse())
def has_a_sparse_buffer(self, x):
    return self.inner(x) @ self.eye


@production("its ids has no values")
def has_integers_without_values():
    made = Layer(lambda self, x: self.inner(x) + self.table(self.ids.clamp(0, 7)).sum(0))
    with torch.device("meta"):
        made.inner, made.table = nn.Linear(W, W), nn.Embedding(8, W)
        made.register_buffer("ids", torch.arange(W), persistent=False)
    return [made]


@production("one parameter has several names in a layer (inner.weight of layer")
def parameter_of_two_names():
    made = Layer(lambda self, x: self.inner(self.same(x)))
    made.same = made.inner
    return [made]


@production("two tensors over one memory")
def tied_in_part_by_data():
    first, last, flat = nn.Linear(W, W), nn.Linear(W, W), torch.randn(W * W + 1)
    first.weight.data, last.weight.data = flat[:-1].view(W, W), flat[1:].view(W, W)
    return [first, last]


@production("two tensors over one memory")
def buffer_over_a_parameter():
    made = Layer(lambda self, x: self.inner(x) @ self.ema)
    made.register_buffer("ema", made.inner.weight.data)
    return [made]


# ------------------------------------------------------------------------------------------ what a copy parts


@layer("without registering it", parts=lambda: [nn.Linear(W, W)])
def holds_a_module(self, x):
    return self.parts[0](self.inner(x))


@production("without registering it")
def holds_a_trained_tensor():
    made = Layer(lambda self, x: self.inner(x) * self.w)
    made.w = torch.ones(W, requires_grad=True)
    return [made]


@production("in others['other'] without registering it")
def holds_another_layer():
    other = nn.Linear(W, W)
    return [other, Layer(lambda self, x: self.inner(x) @ self.others["other"].weight, others={"other": other})]


@production("holds in w a tensor that was computed from parameters")
def computed_before():
    first = nn.Linear(W, W)
    made = Layer(lambda self, x: self.inner(x) @ self.w)
    made.w = first.weight.t()
    return [first, made]


@production("uses a Layer by made in a function of run")
def captures_itself():
    made = Layer(None)
    made.run = lambda self, x: made.inner(x)
    return [made]


@production("uses a Linear by other in a function of _forward_hooks")
def captures_another_in_a_hook():
    other, made = nn.Linear(W, W), nn.Linear(W, W)
    made.register_forward_hook(lambda module, inputs, output: output + other.bias)
    return [other, made]


@production("uses a Linear by other in a function of forward")
def captures_another_in_a_patched_forward():
    other, made = nn.Linear(W, W), nn.Linear(W, W)
    made.forward = MethodType(lambda self, x: x @ other.weight, made)
    return [other, made]


@production("uses a Linear by other in a function")
def captures_another_in_its_class():
    other = nn.Linear(W, W)

    class Local(nn.Module):
        def forward(self, x):
            return x @ other.weight

    return [other, Local()]


def by_global(x):
    return GLOBAL(x)


@production("by the class attribute w")
def has_a_trained_class_attribute():
    made = type("Made", (nn.Module,), {"w": parameter(W), "forward": lambda self, x: x * self.w})
    return [made()]


@production("copy")
def knows_its_parent_weakly():
    made = Layer(lambda self, x: self.child(x), child=Layer(lambda self, x: x @ self.parent().inner.weight))
    made.child.parent = weakref.ref(made)
    return [made]


@production("without registering it")
def knows_its_parent_by_proxy():
    made = Layer(lambda self, x: self.child(x), child=Layer(lambda self, x: x @ self.parent.inner.weight))
    made.child.parent = weakref.proxy(made)
    return [made]


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("not twice")


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        made = memo[id(self)] = CopiesItself(W, W)
        made.load_state_dict(self.state_dict())
        return made


def adds_to_its_count(self, x):
    self.count += 1
    return self.inner(x)


@production("whose memory another tensor has too")
def equal_layers_share_a_changing_buffer():
    first, count = Counts(torch.zeros(4)), torch.zeros(4)
    return [first, Counts(count), Counts(count)]


@production("whose memory another tensor has too")
def shares_a_part_of_a_changing_buffer():
    memory = torch.zeros(4)
    return [Counts(memory[:3]), Counts(memory[2:])]


class Counts(nn.Module):
    """All of them are equal but for the memory of their buffer."""

    def __init__(self, count):
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x):
        self.count.add_(1)
        return x * self.count.sum()


@production("changes its buffer 0.running_mean, whose memory another tensor has too")
def shares_a_batch_norm():
    norm = nn.BatchNorm2d(1)
    return [(nn.Unflatten(1, (1, 1, W)), nn.Sequential(norm), nn.Sequential(norm, nn.Flatten()))]


@production("whose memory another tensor has too", replicas=1)
def has_a_view_of_a_changing_buffer():
    made = Layer(adds_to_its_count, count=torch.zeros(2))
    made.first = made.count[:1]
    return [made]


@production("has no values")
def meta_without_reset():
    with torch.device("meta"):
        return [Layer(lambda self, x: self.inner(x) * self.w, w=nn.Parameter(torch.empty(W)))]


@production("its table is on the meta device, and others of its tensors are not")
def has_a_constant_on_meta():
    made = nn.Linear(W, W)
    made.table = torch.empty(3, device="meta")
    return [made]


@production("after its gradient is accumulated", changes=True)
def hooks_after_accumulation(linear):
    if linear.weight.requires_grad:
        linear.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))


NOT_LINEAR = "not linear in the gradient"
hooks_its_weight("bounds_a_large_gradient", lambda gradient: gradient.clamp(-20, 20), NOT_LINEAR)
hooks_its_weight("clamps_a_gradient", lambda gradient: gradient.clamp(-1e-3, 1e-3), NOT_LINEAR)
one_layer("uses_a_global_by_another_function", lambda self, x: self.inner(x) + by_global(x), "by the global GLOBAL")
layers("has_a_lock", lambda: [Layer(lambda self, x: self.inner(x), lock=threading.Lock())], "cannot be copied")
layers("refuses_to_be_copied", lambda: [Uncopied(W, W)], "a Uncopied cannot be copied (RuntimeError: not twice)")
layers("copies_itself", lambda: [CopiesItself(W, W)], "copy")
