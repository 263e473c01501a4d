"""Faults that the lane must find: a text of a file, its replacement, and the case in which the fault shows."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault. ``text`` occurs once in ``file``."""

    what: str
    file: str
    text: str
    replacement: str
    case: str


STAGE, EXECUTOR = "suite/pipeline/runtime/stage.py", "suite/pipeline/runtime/executor.py"
P2P, LOSS, OWN_LOSS = "suite/pipeline/runtime/p2p.py", "models/loss.py", "experiments/custom/loss.py"
OPTIMIZER, STEP = "suite/training/optimizer.py", "suite/training/stage_optimizer.py"
BATCHNORM = "suite/pipeline/model/batchnorm.py"
BEAM, DECODE, EMBEDDING = "suite/decoding/beam.py", "suite/decoding/decode.py", "models/embedding.py"
TOY, TEXT, ZERO = "toy, fill_drain", "packed text", "toy, two replicas with ZeRO"

MUTATIONS = (
    Mutation(
        "a loss stays on the CPU", STAGE, "self.loss = loss.to(device) if", "self.loss = loss if", "weighted classes"
    ),
    Mutation(
        "layers seed the host's generator alone",
        STAGE,
        "set_seed(layer_seed(self.seed, micro_batch.step, micro_batch.index, index), self.device)",
        'set_seed(layer_seed(self.seed, micro_batch.step, micro_batch.index, index), torch.device("cpu"))',
        TOY,
    ),
    Mutation(
        "layers seed the device's generator alone",
        "suite/pipeline/model/rng.py",
        "for generator in {torch.default_generator, generator_of(device)}",
        "for generator in {generator_of(device)}",
        "draws",
    ),
    Mutation(
        "Python's generator is not seeded",
        "suite/pipeline/model/rng.py",
        "    random.seed(seed)\n    np.random.seed(seed % 2**32)\n\n\n@",
        "    np.random.seed(seed % 2**32)\n\n\n@",
        "draws",
    ),
    Mutation(
        "the generator of device 0",
        "suite/device.py",
        "default_generators[device.index or 0]",
        "default_generators[0]",
        TOY,
    ),
    Mutation(
        "a gradient of zeros on the CPU",
        STAGE,
        "torch.zeros_like(tensor) if tensor.grad is None",
        "torch.zeros(tensor.shape) if tensor.grad is None",
        TOY,
    ),
    Mutation(
        "layers are made on device 0",
        STAGE,
        "by_micro_batch(materialize(layers[index], initial_seed(seed, index), device))",
        "by_micro_batch(materialize(layers[index], initial_seed(seed, index), torch.device(device.type, 0)))",
        TOY,
    ),
    Mutation("inputs stay on the CPU", EXECUTOR, "tensor.to(self.stage.device, non_blocking=True)", "tensor", TOY),
    Mutation(
        "inputs are copied by a blocking copy",
        EXECUTOR,
        "tensor.to(self.stage.device, non_blocking=True)",
        "tensor.to(self.stage.device)",
        TOY,
    ),
    Mutation(
        "the first gradient is made on the CPU",
        EXECUTOR,
        "torch.full_like(objective, state.loss_gradient)",
        "torch.full(objective.shape, state.loss_gradient, dtype=objective.dtype)",
        TOY,
    ),
    Mutation(
        "a metric is read in each action",
        EXECUTOR,
        "state.results[i] = (outputs[0].detach(), metric)",
        "state.results[i] = (outputs[0].detach(), torch.full_like(metric, metric.item()))",
        TOY,
    ),
    Mutation(
        "a trace waits for the device in each action",
        "suite/pipeline/runtime/recorder.py",
        "        event.record()\n",
        "        event.record()\n        synchronize(self._device)\n",
        "toy, statistics and trace",
    ),
    Mutation("messages arrive on the CPU", P2P, "spec.empty(self._device)", 'spec.empty(torch.device("cpu"))', TOY),
    Mutation(
        "messages arrive on the current device",
        P2P,
        "spec.empty(self._device)",
        "spec.empty(torch.device(self._device.type))",
        TOY,
    ),
    Mutation(
        "links are warmed up from the CPU",
        "suite/pipeline/model/topology.py",
        "token = torch.zeros(1, device=device)",
        "token = torch.zeros(1)",
        TOY,
    ),
    Mutation(
        "packed ids pass through the CPU",
        "suite/pipeline/runtime/packing.py",
        "messages.append(torch.cat(",
        "messages.append(None if tensors[0].cpu() is None else torch.cat(",
        TOY,
    ),
    Mutation(
        "a bias is added on the CPU",
        "suite/pipeline/runtime/weight_grad.py",
        "summand = gradient.sum(0).to(module.bias.dtype)",
        "summand = gradient.cpu().sum(0).to(module.bias.dtype)",
        "toy, zero_bubble",
    ),
    Mutation(
        "positions on the CPU",
        EMBEDDING,
        "steps = torch.arange(width // 2, device=like.device, dtype=torch.float32)",
        "steps = torch.arange(width // 2, dtype=torch.float32)",
        "t12_400m in bf16",
    ),
    Mutation(
        "places of a row on the CPU",
        EMBEDDING,
        "torch.arange(starts.shape[1], device=starts.device)",
        "torch.arange(starts.shape[1])",
        "t12_400m in bf16",
    ),
    Mutation(
        "attention asks whether it needs its mask",
        "models/blocks.py",
        "        mask = (visible.tril() if causal else visible)[:, None]\n",
        "        mask = None if visible.all() else (visible.tril() if causal else visible)[:, None]\n",
        "t12_400m in bf16",
    ),
    Mutation(
        "padding is masked out by a shape",
        LOSS,
        "torch.where(scored, torch.lerp(nll, uniform_nll, smoothing), 0).sum()",
        "torch.lerp(nll, uniform_nll, smoothing)[scored].sum()",
        TEXT,
    ),
    Mutation(
        "the objective's gradient is read to the host",
        LOSS,
        "(objective_grad * (labels != PADDING))",
        "(objective_grad.item() * (labels != PADDING))",
        TEXT,
    ),
    Mutation(
        "gradients of chunks are added on the CPU",
        "models/chunked_loss.py",
        "weight_grad, bias_grad = torch.zeros_like(weight), ",
        "weight_grad, bias_grad = torch.zeros(weight.shape), ",
        "chunked loss in fp32",
    ),
    Mutation(
        "classes are counted by a mask",
        OWN_LOSS,
        "torch.where(counted, weight[labels.where(counted, 0)], 0)\n",
        "weight[labels[counted]]\n",
        "weighted classes",
    ),
    Mutation(
        "units are read from the device",
        OWN_LOSS,
        "    return weights.sum()\n",
        "    return weights.sum().item()\n",
        "digits.py:digits",
    ),
    Mutation(
        "an empty micro-batch is asked for",
        OWN_LOSS,
        "return torch.where(units == 0, 0, mean * factor)",
        "return mean * factor if units != 0 else mean * 0",
        "gpt2 in fp32",
    ),
    Mutation(
        "the norm starts on the CPU",
        STEP,
        "zero = torch.zeros((), dtype=torch.float64, device=self.stage.device)",
        "zero = torch.zeros((), dtype=torch.float64)",
        TOY,
    ),
    Mutation(
        "each square is read on its own",
        STEP,
        "squares[layer].append(_square(gradient))",
        "squares[layer].append(_square(gradient).cpu().to(gradient.device, non_blocking=True))",
        TOY,
    ),
    Mutation("DeepSpeed takes device 0", OPTIMIZER, "LOCAL_RANK=str(device.index or 0)", 'LOCAL_RANK="0"', TOY),
    Mutation(
        "ZeRO's state on device 0",
        OPTIMIZER,
        "self._utils.safe_set_full_optimizer_state(parameter, state[name].to(parameter.device), name)",
        'self._utils.safe_set_full_optimizer_state(parameter, state[name].to("standin:0"), name)',
        "checkpoint of two replicas with ZeRO",
    ),
    Mutation(
        "optimizer state is loaded to the CPU",
        OPTIMIZER,
        'value.to("cpu" if name == "step" and not self._step_on_device else parameter.device)',
        'value.to("cpu")',
        "checkpoint",
    ),
    Mutation(
        "figures of a validation on device 0",
        "suite/training/validation.py",
        "sums.to(executor.stage.device, non_blocking=True)",
        "sums.to(torch.device(executor.stage.device.type, 0), non_blocking=True)",
        TOY,
    ),
    Mutation(
        "a checkpoint's tensors become the parameters",
        "suite/training/checkpoint/loading.py",
        "layer.load_state_dict(values_of(tensors))",
        "layer.load_state_dict(values_of(tensors), assign=True)",
        "checkpoint",
    ),
    Mutation(
        "beam scores stay on the host",
        BEAM,
        "self._scores[..., None].to(logits.device, non_blocking=True)",
        "self._scores[..., None]",
        "decoding",
    ),
    Mutation(
        "NaN is looked for on the device",
        BEAM,
        "if scores.isnan().any()",
        "if log_probabilities.isnan().any()",
        "decoding",
    ),
    Mutation(
        "tokens stay on the host",
        DECODE,
        "update.tokens.view(-1, 1).to(self._device, non_blocking=True)",
        "update.tokens.view(-1, 1)",
        "decoding",
    ),
    Mutation(
        "caches are reordered by an index on the host",
        "suite/decoding/kv_cache.py",
        "(index.to(device, non_blocking=True) for index in (rows, self.kept))",
        "(rows, self.kept)",
        "decoding",
    ),
    Mutation(
        "BatchNorm's counts stay on the CPU", BATCHNORM, ".to(like.device, non_blocking=True)", "", "resnet_18 in fp32"
    ),
    Mutation(
        "BatchNorm's moments on the CPU",
        BATCHNORM,
        "mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)",
        "mean, variance = torch.zeros(self.num_features), torch.zeros(self.num_features)",
        "resnet_18 in fp32",
    ),
    Mutation(
        "a tied copy is received on the CPU",
        "suite/pipeline/model/ties.py",
        "torch.empty_like(own_copies[0])",
        "torch.empty(own_copies[0].shape)",
        TOY,
    ),
    Mutation(
        "kurtosis is read in the action",
        "suite/training/layer_stats.py",
        "squares.square_().mean() / variance.square() - 3",
        "float(squares.square_().mean() / variance.square() - 3)",
        "toy, statistics and trace",
    ),
)
