"""What a run refuses in layers: a list of rules.

Each layer is tried alone on a few rows, from the first to the last. A rule is a function of a ``Trial``. Rules about
the list of layers are in ``spec_check``, those about what layers hold in ``held_tensors``, and what ``gpipe check``
says about layers that a run accepts in ``layer_traits``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.custom.layers import initialised
from experiments.custom.trial import KEEP_STATE, Trial, described, equal, name_of, same_bits, trials
from suite.device import one_thread
from suite.errors import SettingError, typed_line
from suite.pipeline.model.batchnorm import by_micro_batch
from suite.pipeline.model.layer_copy import copied, held
from suite.pipeline.model.layers import ORIGINAL, Tensors, as_tuple
from suite.pipeline.runtime.boundary import CutSpec
from suite.pipeline.runtime.shape_inference import ShapeInference
from suite.pipeline.runtime.skip import stashes_of

_TENSORS = "it must return one tensor or a tuple of tensors"


def trains_its_parameters(trial: Trial) -> str:
    """In a type and with a shape that the optimizer can update."""
    for name, parameter in trial.layer.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            return (
                f"trains {name} in {str(parameter.dtype).removeprefix('torch.')}, where most updates round to nothing; "
                "convert the layer with .float() and set optimizer.precision=bf16"
            )
        if parameter.is_complex():
            return f"has the complex parameter {name}; keep its real and imaginary parts (torch.view_as_real)"
        if parameter.dim() == 0:
            return f"has the parameter {name} without an axis; use torch.ones(1) instead of torch.tensor(1.0)"
    return ""


def takes_its_inputs(trial: Trial) -> str:
    """And leaves them as they are, because a recompute needs them."""
    try:
        _ = trial.returned
    except Exception as error:
        return f"cannot take {trial.taken}: {typed_line(error)}"
    versions = [tensor._version for tensor in trial.inputs]
    if versions != trial.versions or not all(map(same_bits, trial.inputs, trial.kept)):
        return (
            "changes its inputs in place, and a recompute would start from changed ones; use the operation that "
            "returns a new tensor (for modules of torch inplace=False)"
        )
    return ""


def returns_tensors(trial: Trial) -> str:
    """Dense and real ones of torch's own class, its stashes last: others cannot be sent."""
    stashes = stashes_of(trial.layer)
    is_several = isinstance(trial.returned, tuple | list)
    outputs = trial.returned if is_several else [trial.returned]
    for output in outputs:
        found = ""
        if not isinstance(output, Tensor):
            found = "nothing" if output is None else f"a {type(output).__name__}"
        elif type(output) not in (Tensor, nn.Parameter):
            found = f"a {type(output).__name__}, a class that no message keeps (.as_subclass(torch.Tensor))"
        elif output.layout != torch.strided:
            found = "a sparse tensor, not a dense one"
        elif output.is_complex():
            found = f"a tensor of {str(output.dtype).removeprefix('torch.')}, not a real one (torch.view_as_real)"
        if found:
            return f"returns {found}{' among its outputs' if is_several else ''}; {_TENSORS}"
    if len(outputs) <= len(stashes):
        count = {0: "no tensors", 1: "one tensor"}.get(len(outputs), f"{len(outputs)} tensors")
        return f"returns {count}; {_TENSORS}{', then what it stashes: ' * bool(stashes)}{', '.join(stashes)}"
    return ""


def repeats_its_forward(trial: Trial) -> str:
    """From the same inputs, seeds and buffers, as a recompute does."""
    try:
        again = trial.again
    except Exception as error:
        return f"runs once, and fails in another forward from the same state, as a recompute is ({typed_line(error)})"
    if equal(trial.first, again):
        return ""
    outside = "uses something outside that changes, such as a global variable, the clock or another generator"
    return (
        "returns other values for the same inputs and seeds, so a recompute would not repeat its forward: "
        f"it {' and '.join(trial.changed_attributes) or outside}; {KEEP_STATE}"
    )


def keeps_its_parameters(trial: Trial) -> str:
    """The optimizer alone changes them."""
    before, now = dict(trial.layer.named_parameters()), dict(trial.module.named_parameters())
    for name, parameter in (trial.parameters | now).items():
        if name not in before:
            return f"makes its parameter {name} in a forward, which no optimizer knows; make it when the layer is built"
        is_own = now.get(name) is parameter is trial.parameters[name]
        is_trained = parameter.requires_grad == before[name].requires_grad
        if not (is_own and is_trained and same_bits(parameter, before[name])):
            return f"changes its parameter {name} in a forward, and a recompute would change it again"
    return ""


def forgets_other_rows(trial: Trial) -> str:
    """What it remembers in attributes does not reach another micro-batch."""
    others = [tensor.flip(0 if len(tensor) > 1 else -1) if tensor.dim() else tensor for tensor in trial.inputs]
    changes = " and ".join(trial.changed_attributes)
    if not changes:
        return ""
    try:
        after = trial.fresh(tuple(others), trial.inputs)
    except Exception as error:
        return f"{changes}, and fails after other rows ({typed_line(error)}); {KEEP_STATE}"
    if not equal(trial.first, after):
        return f"{changes}, and returns other values after other rows; {KEEP_STATE}"
    return ""


def has_gradients(trial: Trial) -> str:
    """Dense ones, in its parameters."""
    trained = any(parameter.requires_grad for parameter in trial.layer.parameters())
    if trained and any(map(torch.is_floating_point, trial.first)) and not any(t.requires_grad for t in trial.again):
        return "returns nothing that depends on its parameters, so nothing trains them; leave detach and no_grad out"
    try:
        gradients = trial.gradients
    except Exception as error:
        return f"has a backward that fails: {typed_line(error)}"
    if trial.draws_backward:
        return "draws random numbers in its backward, where nothing seeds them; draw them in the forward"
    for name, gradient in gradients.items():
        if gradient is not None and gradient.is_sparse:
            return f"has sparse gradients of {name}; build the embedding with sparse=False"
    return ""


def evaluates_with_the_same_shapes(trial: Trial) -> str:
    """Messages have the shapes of training."""
    try:
        outputs = trial.fresh(trial.inputs, training=False)
    except Exception as error:
        return f"fails in evaluation mode: {typed_line(error)}"
    if (found := described(outputs)) != (wanted := described(trial.first)):
        return f"returns {found} in evaluation mode and {wanted} in training; make them equal"
    return ""


def runs_without_values(trial: Trial) -> str:
    """On the meta device, where shapes of messages are found, and on fake tensors, where costs are counted."""
    try:
        bare = copied(trial.layer, lambda tensor: tensor.to("meta"))
        with torch.no_grad():
            found = described(as_tuple(bare(*(tensor.to("meta") for tensor in trial.inputs))))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            trial.fresh(tuple(mode.from_tensor(tensor.detach()) for tensor in trial.inputs))
    except Exception as error:
        return (
            f"does not run on tensors without values, by which shapes and costs are found ({typed_line(error)}); what "
            "it computes must not depend on values (use torch.where), and every tensor that it holds must be a "
            "parameter or a buffer"
        )
    if found != described(trial.first):
        return f"returns {described(trial.first)}, and {found} on the meta device; shapes must not depend on values"
    return ""


RULES = (
    trains_its_parameters,
    takes_its_inputs,
    returns_tensors,
    repeats_its_forward,
    keeps_its_parameters,
    forgets_other_rows,
    has_gradients,
    evaluates_with_the_same_shapes,
    runs_without_values,
)
"""Each returns what is wrong, as it goes on after the layer's name, or an empty text. A rule may rely on those before
it."""


def refusal(trial: Trial) -> str:
    """Returns what the first rule says that a layer breaks, as it goes on after the layer's name; empty without one."""
    return next(filter(None, (rule(trial) for rule in RULES)), "")


def find_refusal(layers: Sequence[nn.Module], loss: nn.Module, inputs: Tensors, targets: Tensors) -> str:
    """Runs a few rows through all layers, which are on the meta device, and the loss; returns what a run would stumble
    over, empty if nothing. So a user reads of a wrong layer before any worker starts. Raises SettingError for a layer
    without initial values."""

    def ready(layer: nn.Module) -> nn.Module:
        return by_micro_batch(initialised(layer))

    shared, outputs, changed = _shared_buffers(layers), dict[int, Tensors](), dict[int, list[str]]()
    for index, trial in trials(layers, inputs, ready):
        name = name_of(index, layers[index])
        if isinstance(trial, int):
            outputs[index], changed[index] = outputs[trial], changed[trial]
        else:
            fault = refusal(trial)
            if fault:  # again, because sums of several threads may be in another order on a busy machine
                with one_thread():
                    fault = refusal(Trial(ready(layers[index]), trial.kept, trial.taken))
            if fault:
                return f"{name} {fault}"
            outputs[index], changed[index] = trial.first, [*_changed_in_training(trial)]
        for buffer in changed[index]:
            if (index, buffer) in shared:
                return f"{name} changes its buffer {buffer}, whose memory another tensor has too; give each its own"
    last = ShapeInference(layers).infer_all(CutSpec.of(inputs))[-1]
    is_trained = any(tensor.needs_gradient for tensor in last.main)
    untrained = "nothing that the last layer returns depends on a trained parameter; leave detach and no_grad out"
    return _loss_fault(loss, outputs.get(len(layers) - 1, inputs), targets) or ("" if is_trained else untrained)


def _shared_buffers(layers: Sequence[nn.Module]) -> set[tuple[int, str]]:
    """Returns the buffers whose memory another layer or tensor has too, by layer and name."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        original = vars(layer).get(ORIGINAL)
        for path, value in held(layer if original is None else original.layer):
            if isinstance(value, Tensor) and value.layout == torch.strided:
                owners.setdefault(value.untyped_storage().data_ptr() or id(value), []).append((index, path))
    return {place for places in owners.values() if len(places) > 1 for place in places}


def _changed_in_training(trial: Trial) -> Iterator[str]:
    """Yields the buffers that each forward changes, and those of BatchNorm, which change once a step."""
    yield from trial.changed_buffers
    for prefix, module in trial.layer.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            yield from (f"{prefix}.{name}".lstrip(".") for name, _ in module.named_buffers())


def _loss_fault(loss: nn.Module, outputs: Tensors, targets: Tensors) -> str:
    leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in outputs)
    try:
        objective, _ = loss(*leaves, *targets)
    except SettingError as fault:
        return str(fault)
    except Exception as error:
        return f"the loss cannot take {described(outputs)} with targets {described(targets)}: {typed_line(error)}"
    if objective.dim():
        return f"the loss returns a tensor of shape {tuple(objective.shape)}; it must be one number, a mean over rows"
    if not objective.requires_grad:
        return "the loss has no gradient; it must be differentiable in the last layer's outputs"
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            loss(*(mode.from_tensor(tensor.detach()) for tensor in (*outputs, *targets)))
    except Exception as error:
        return (
            f"the loss does not run on tensors without values, from which costs are estimated ({typed_line(error)}); "
            "shapes must not depend on values: use torch.where instead of a mask as an index"
        )
    return ""
