"""Faults in the engine of a worker: each function plants one, by wrapping a method until its ``Patches`` end."""

import contextlib

import torch

from suite.pipeline.model import ties
from suite.pipeline.runtime import executor, p2p, stage
from suite.training import stage_optimizer


class Patches(contextlib.ExitStack):
    """Wraps methods until its end."""

    def wrap(self, owner, name, wrapped):
        """Replaces a function by ``wrapped(the function, *its arguments)``."""
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: wrapped(original, *args, **kwargs))
        self.callback(setattr, owner, name, original)


def another_seed_in_recomputes(patches):
    patches.wrap(stage, "layer_seed", lambda f, run, step, i, layer: f(run, step, i + torch.is_grad_enabled(), layer))


def copies_not_summed(patches):
    patches.wrap(ties.TiedParameters, "sum_gradients", lambda f, own: None)


def gradients_kept(patches):
    patches.wrap(stage_optimizer.StageOptimizer, "clear", lambda f, own: None)


def late_learning_rate(patches):
    patches.wrap(stage_optimizer, "learning_rate", lambda f, step, settings: f(step + 1, settings))


def not_clipped(patches):
    patches.wrap(stage_optimizer, "_clip", lambda f, *args: None)


def summed_twice(patches):
    def finish(original, own):
        found = original(own)
        for _, gradient in found:
            gradient.mul_(2)
        return found

    patches.wrap(stage_optimizer.StageOptimizer, "finish_reduction", finish)


# ---------------------------------------------------------------------------------------------------------------------
# kinds of faults; each returns what plants one


def in_layer(layer, change):
    """``change(own, module)`` is called for a layer of a worker's stage ``own`` once it is built."""

    def plant(patches):
        def init(original, own, *args, **kwargs):
            original(own, *args, **kwargs)
            if layer in own.by_index:
                change(own, own.by_index[layer])

        patches.wrap(stage.Stage, "__init__", init)

    return plant


def output_off(layer, i):
    def change(own, module):
        def hook(_, inputs, outputs):
            first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
            first = first * 1.001 if own.micro_batch == i else first
            return (first, *others) if others else first

        module.register_forward_hook(hook)

    return in_layer(layer, change)


def input_gradient_off(layer, i):
    def change(own, module):
        def hook(_, inputs):
            first, *others = inputs
            if first.requires_grad and own.micro_batch == i:
                first = first.view_as(first)
                first.register_hook(lambda gradient: gradient * 1.001)
            return first, *others

        module.register_forward_pre_hook(hook)

    return in_layer(layer, change)


def other_seed(layer, i, step=0):
    def seed(original, run, at, micro_batch, index):
        return original(run, at, micro_batch + (index == layer and micro_batch == i and at >= step) * 9, index)

    return lambda patches: patches.wrap(stage, "layer_seed", seed)


def other_initial(layer):
    return lambda patches: patches.wrap(stage, "initial_seed", lambda f, seed, index: f(seed + (index == layer), index))


def around_backward(layer, behind):
    """``behind(own, i, gradients before)`` is called behind each backward on the stage of a layer."""

    def backward(original, own, micro_batch, gradients):
        before = {key: None if p.grad is None else p.grad.clone() for key, p in own.named_parameters().items()}
        found = original(own, micro_batch, gradients)
        if layer in own.by_index:
            behind(own, micro_batch.index, before)
        return found

    return lambda patches: patches.wrap(stage.Stage, "backward", backward)


def dropped(layer, i):
    def behind(own, index, before):
        for key, parameter in own.named_parameters().items():
            parameter.grad = before[key] if index == i else parameter.grad

    return around_backward(layer, behind)


def summed_in_bf16(layer):
    def behind(own, *_):
        weight = next(own.by_index[layer].parameters())
        weight.grad = weight.grad.bfloat16().float()

    return around_backward(layer, behind)


def loss_gradient_off(i):
    def backward(original, own, micro_batch, gradients):
        is_it = own.loss is not None and micro_batch.index == i
        return original(own, micro_batch, (gradients[0] * 2,) if is_it else gradients)

    return lambda patches: patches.wrap(stage.Stage, "backward", backward)


def targets_shifted(i):
    def targets(original, own, state, action):
        return tuple(target.roll(int(action.micro_batch == i)) for target in original(own, state, action))

    return lambda patches: patches.wrap(executor.Executor, "_targets", targets)


def message_off(what, i, change):
    """Changes the floating-point tensors of message ``i`` of activations or gradients by ``change(new, last)``."""
    last = {}

    def recv(original, own, at):
        found = original(own, at)
        before, last[id(own)] = last.get(id(own), found), found
        if what not in own._what or at != i:
            return found
        changed = zip(found, before, strict=True)
        return tuple(change(t, b) if t.is_floating_point() else t for t, b in changed)

    return lambda patches: patches.wrap(p2p.RecvQueue, "recv", recv)


MESSAGE_FAULTS = {
    "stale": lambda tensor, before: before,
    "rounded": lambda tensor, before: tensor.bfloat16().to(tensor.dtype),
}


def parameter_skipped(layer, name):
    def update(original, own, *args):
        parameter = own._trainable.get((layer, name))
        kept = None if parameter is None else parameter.detach().clone()
        found = original(own, *args)
        if kept is not None:
            parameter.data.copy_(kept)
        return found

    return lambda patches: patches.wrap(stage_optimizer.StageOptimizer, "update", update)


def replica_lost(layer, i):
    """Replica 1 hands over its gradients before those of a micro-batch are in them."""

    def behind(own, index, before):
        for key, parameter in own.named_parameters().items():
            parameter.grad = before[key] if (key[0], index) == (layer, i) else parameter.grad

    return around_backward(layer, behind)
