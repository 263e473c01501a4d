"""Faults that the lane must find."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """One fault. ``text`` occurs once in ``file``; the fault shows in the case."""

    what: str
    file: str
    text: str
    replacement: str
    case: str


def read(table: str) -> tuple[Mutation, ...]:
    """Returns the faults of a table: what is wrong, file and case, the text and its replacement as in a diff."""
    mutations = []
    for fault in table.strip("\n").split("\n\n"):
        what, place, *changes = fault.split("\n")
        file, _, case = place.partition(": ")
        text, replacement = ("\n".join(line[1:] for line in changes if line[0] == mark) for mark in "-+")
        mutations.append(Mutation(what, file, text, replacement, case))
    return tuple(mutations)


MUTATIONS = read(r"""
a loss stays on the CPU
suite/pipeline/runtime/stage.py: weighted classes
-self.loss = loss.to(device) if
+self.loss = loss if

layers seed the host's generator alone
suite/pipeline/runtime/stage.py: toy, fill_drain
-set_seed(layer_seed(self.seed, micro_batch.step, micro_batch.index, index), self.device)
+set_seed(layer_seed(self.seed, micro_batch.step, micro_batch.index, index), torch.device("cpu"))

Python's generator is not seeded
suite/pipeline/model/rng.py: draws
-    random.seed(seed)
-    np.random.seed(seed % 2**32)
-
-
-@
+    np.random.seed(seed % 2**32)
+
+
+@

the generator of device 0
suite/device.py: toy, fill_drain
-default_generators[device.index or 0]
+default_generators[0]

layers are made on device 0
suite/pipeline/runtime/stage.py: toy, fill_drain
-by_micro_batch(materialize(layers[index], initial_seed(seed, index), device))
+by_micro_batch(materialize(layers[index], initial_seed(seed, index), torch.device(device.type, 0)))

inputs stay on the CPU
suite/pipeline/runtime/executor.py: toy, fill_drain
-tensor.to(self.stage.device, non_blocking=True)
+tensor

inputs are copied by a blocking copy
suite/pipeline/runtime/executor.py: toy, fill_drain
-tensor.to(self.stage.device, non_blocking=True)
+tensor.to(self.stage.device)

a trace waits for the device in each action
suite/pipeline/runtime/recorder.py: toy, statistics and trace
-        event.record()
+        event.record()
+        synchronize(self._device)

messages arrive on the current device
suite/pipeline/runtime/p2p.py: toy, fill_drain
-spec.empty(self._device)
+spec.empty(torch.device(self._device.type))

packed ids pass through the CPU
suite/pipeline/runtime/packing.py: toy, fill_drain
-messages.append(torch.cat(
+messages.append(None if tensors[0].cpu() is None else torch.cat(

a bias is added on the CPU
suite/pipeline/runtime/weight_grad.py: toy, zero_bubble
-summand = gradient.sum(0).to(module.bias.dtype)
+summand = gradient.cpu().sum(0).to(module.bias.dtype)

positions on the CPU
models/embedding.py: t12_400m in bf16
-steps = torch.arange(width // 2, device=like.device, dtype=torch.float32)
+steps = torch.arange(width // 2, dtype=torch.float32)

attention asks whether it needs its mask
models/blocks.py: t12_400m in bf16
-    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
+    mixed = F.scaled_dot_product_attention(query, key, value, mask if mask.any() else None, is_causal=causal)

padding is masked out by a shape
models/loss.py: t12_400m in bf16
-torch.where(scored, torch.lerp(nll, uniform_nll, smoothing), 0).sum()
+torch.lerp(nll, uniform_nll, smoothing)[scored].sum()

the objective's gradient is read to the host
models/loss.py: t12_400m in bf16
-(objective_grad * (labels != PADDING))
+(objective_grad.item() * (labels != PADDING))

classes are counted by a mask
experiments/custom/loss.py: weighted classes
-torch.where(counted, weight[labels.where(counted, 0)], 0)
+weight[labels[counted]]

each square is read on its own
suite/training/stage_optimizer.py: toy, fill_drain
-squares[layer].append(_square(gradient))
+squares[layer].append(_square(gradient).cpu().to(gradient.device, non_blocking=True))

DeepSpeed takes device 0
suite/training/optimizer.py: toy, fill_drain
-LOCAL_RANK=str(device.index or 0)
+LOCAL_RANK="0"

ZeRO's state on device 0
suite/training/optimizer.py: checkpoint of two replicas with ZeRO
-self._utils.safe_set_full_optimizer_state(parameter, state[name].to(parameter.device), name)
+self._utils.safe_set_full_optimizer_state(parameter, state[name].to("standin:0"), name)

optimizer state is loaded to the CPU
suite/training/optimizer.py: checkpoint
-value.to("cpu" if name == "step" and not self._step_on_device else parameter.device)
+value.to("cpu")

figures of a validation on device 0
suite/training/validation.py: toy, fill_drain
-sums.to(executor.stage.device, non_blocking=True)
+sums.to(torch.device(executor.stage.device.type, 0), non_blocking=True)

a checkpoint's tensors become the parameters
suite/training/checkpoint/loading.py: checkpoint
-layer.load_state_dict(values_of(tensors))
+layer.load_state_dict(values_of(tensors), assign=True)

beam scores stay on the host
suite/decoding/beam.py: decoding
-self._scores[..., None].to(logits.device, non_blocking=True)
+self._scores[..., None]

NaN is looked for on the device
suite/decoding/beam.py: decoding
-if scores.isnan().any()
+if log_probabilities.isnan().any()

caches are reordered by an index on the host
suite/decoding/kv_cache.py: decoding
-(index.to(device, non_blocking=True) for index in (rows, self.kept))
+(rows, self.kept)

BatchNorm's counts stay on the CPU
suite/pipeline/model/batchnorm.py: weighted classes
-.to(like.device, non_blocking=True)
+

kurtosis is read in the action
suite/training/layer_stats.py: toy, statistics and trace
-squares.square_().mean() / variance.square() - 3
+float(squares.square_().mean() / variance.square() - 3)
""")
