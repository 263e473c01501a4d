"""Fifty faults of this field, written by hand: most are silent, and each one would hurt a user.

They were chosen by what goes wrong in pipelines, training, checkpoints, data, decoding and restarts, and not by what
tests look at. None of them is planted elsewhere in the tests.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """``text``, which occurs once in ``file``, is replaced."""

    what: str
    file: str
    text: str
    replacement: str


FAULTS: tuple[Fault, ...] = (
    # -----------------------------------------------------------------------------------------------------------------
    # the pipeline: what a stage runs, what it keeps, and what it tells its neighbours
    Fault(
        "Validation runs in training mode, so dropout is on.",
        "suite/pipeline/runtime/executor.py",
        "self.stage.train(False)",
        "self.stage.train(True)",
    ),
    Fault(
        "Where shapes are those of the step before, later stages of replica 1 draw the dropout masks of replica 0.",
        "suite/pipeline/runtime/metadata.py",
        "[metadata.offset, _AS_BEFORE]",
        "[0, _AS_BEFORE]",
    ),
    Fault(
        "A recompute starts from the buffers that later forwards have changed, and changes them again.",
        "suite/pipeline/runtime/stage.py",
        "torch.enable_grad(), replaced(micro_batch.buffers)",
        "torch.enable_grad()",
    ),
    Fault(
        "The bf16 copies of the weights are kept after an update, so every step multiplies by the first weights.",
        "suite/pipeline/runtime/weight_grad.py",
        "linear.keeps_cast, linear.kept_cast = keep, None",
        "linear.keeps_cast = keep",
    ),
    Fault(
        "A layer draws the same dropout mask in every step.",
        "suite/pipeline/model/rng.py",
        "mix(1, train_seed, step, micro_batch, layer)",
        "mix(1, train_seed, micro_batch, layer)",
    ),
    Fault(
        "Of two copies of a tied parameter on one stage, the first one's gradient counts twice and the other is lost.",
        "suite/pipeline/model/ties.py",
        "next(local).clone()",
        "own_copies[0].clone()",
    ),
    Fault(
        "BatchNorm's running variance is divided by the number of values and not by one less.",
        "suite/pipeline/model/batchnorm.py",
        "max(count - 1, 1)",
        "count",
    ),
    Fault(
        "A tensor that skips stages is taken for the output of the stage before, where both have one shape.",
        "suite/pipeline/runtime/p2p.py",
        "tuple(tensors[at] for at in sorted(tensors))",
        "tuple(tensors.values())",
    ),
    Fault(
        "The gradient of a skip is lost, at every number of stages alike.",
        "suite/pipeline/runtime/skip.py",
        "popped = [stash.pop(name) for",
        "popped = [stash.pop(name).detach() for",
    ),
    Fault(
        "In bf16 the tensors between stages are fp32: messages are twice as large, and results depend on the cuts.",
        "suite/pipeline/runtime/shape_inference.py",
        "(*main, *popped), to_bf16)",
        "(*main, *popped))",
    ),
    Fault(
        "With ZeRO, the part of a parameter that reaches into the next replica's shard is not averaged.",
        "suite/pipeline/runtime/gradient_reducer.py",
        "min(end, (replica + 1) * size)",
        "end",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # schedules
    Fault(
        "With replicas and a split backward, gradients are averaged before the last weight gradients are added.",
        "suite/pipeline/schedule/action.py",
        "EFFECTS[action.kind].inputs < 0",
        "EFFECTS[action.kind].graphs < 0",
    ),
    Fault(
        "A schedule passes in which two stages disagree about the order of the micro-batches between them.",
        "suite/pipeline/schedule/validate.py",
        "if own_order != next_order:",
        "if sorted(own_order) != sorted(next_order):",
    ),
    Fault(
        "A played stage goes on with too many sends in flight, so a schedule that stops is not refused.",
        "suite/pipeline/schedule/play.py",
        "if len(sends) > self._flow.max_sends_to(distance):",
        "if len(sends) > 2 * self._flow.max_sends_to(distance):",
    ),
    Fault(
        "One graph more is kept than the user allows, which with the paper's rule is twice the memory.",
        "suite/pipeline/schedule/remat.py",
        "[0] * (max_graphs - 1)",
        "[0] * max_graphs",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # planning
    Fault(
        "The search for the lightest heaviest cell skips cuts, so stages are less even than they could be.",
        "suite/pipeline/planning/partition.py",
        "(prefix[within[starts] + 1] - prefix[starts]).min()",
        "(prefix[within[starts] + 1] - prefix[starts]).max()",
    ),
    Fault(
        "A plan with replicas forgets ZeRO's flat copies of the weights and gradients, and runs out of memory.",
        "suite/pipeline/planning/memory.py",
        "(8.0 + state) / replicas",
        "state / replicas",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # training
    Fault(
        "Each copy of a tied parameter counts in the gradient norm, so the gradients are clipped too much.",
        "suite/training/stage_optimizer.py",
        "if self._ties.is_first_copy(layer, name):",
        "if gradient.numel():",
    ),
    Fault(
        "A step that is skipped because of NaN still writes its NaN into BatchNorm's running statistics.",
        "suite/training/stage_optimizer.py",
        "running_stats.update(applied,",
        "running_stats.update(True,",
    ),
    Fault(
        "After the end of a cosine decay the learning rate rises again.",
        "suite/training/update_rule.py",
        "math.cos(math.pi * min(1.0, periods))",
        "math.cos(math.pi * periods)",
    ),
    Fault(
        "The best checkpoint is chosen by the loss, whatever the criterion is, and of accuracies the worst one wins.",
        "suite/training/validation.py",
        'figures.loss if self.criterion.name == "loss" else figures.metrics[0]',
        "figures.loss",
    ),
    Fault(
        "The fingerprint of a large tensor covers its beginning alone, so a difference behind it is not seen.",
        "suite/training/fingerprints.py",
        "values.cpu().view(torch.uint8)",
        "values[:PART].cpu().view(torch.uint8)",
    ),
    Fault(
        "After a resume with ZeRO, all groups of parameters but the first count Adam's steps from zero again.",
        "suite/training/optimizer.py",
        'self._step_counts if "step" in state',
        'self._step_counts[:1] if "step" in state',
    ),
    Fault(
        "The best weights so far are not kept unless a checkpoint is due in the same step.",
        "suite/training/loop.py",
        "(improved or ask or",
        "(ask or",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # checkpoints
    Fault(
        "A manifest is published although the first stage could not write its layers.",
        "suite/training/checkpoint/async_save.py",
        "self._fault is not None or not self._wait_for(",
        "not self._wait_for(",
    ),
    Fault(
        "After a power cut a file has its new name and not its content.",
        "suite/paths.py",
        "os.fsync(file.fileno())",
        "file.flush()",
    ),
    Fault(
        "A layer with a flipped bit is loaded, because only its size is compared.",
        "suite/training/checkpoint/reading.py",
        "digest(data) != expected.sha256",
        "len(data) != expected.bytes",
    ),
    Fault(
        "A checkpoint counts as good without a finite step after it, so the last good one is removed.",
        "suite/training/checkpoint/writing.py",
        "0 < self._newest < self._last_finite",
        "0 < self._newest <= self._last_finite",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # data
    Fault(
        "One random number chooses pair and direction, so half of the pairs are never translated from English.",
        "suite/data/text/sampling.py",
        "numbers[2] < 0.5",
        "numbers[1] < 0.5",
    ),
    Fault(
        "The last mini-batch of held-out rows is smaller and is divided by the size of a whole one.",
        "suite/data/epochs.py",
        "float(len(rows) * self._units)",
        "float(self._size * self._units)",
    ),
    Fault(
        "Training pairs whose English side is in the user's test file stay in the training text.",
        "suite/data/text/parallel.py",
        "group_key(pair[0]) not in held_out",
        "pair[0] not in held_out",
    ),
    Fault(
        "After a change of the longest sentence the text that was prepared for the old length is used.",
        "suite/data/text/prepare.py",
        "settings.vocabulary, settings.max_length]",
        "settings.vocabulary]",
    ),
    Fault(
        "Two runs that start at once prepare the same data, and each removes the other's half-written files.",
        "suite/data/cache.py",
        "        if not folder.exists():\n            _build(folder, build)",
        "    if not folder.exists():\n        _build(folder, build)",
    ),
    Fault(
        "A misspelled setting in a file or in Python is ignored.",
        "suite/settings.py",
        'extra="forbid"',
        'extra="ignore"',
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # decoding, scores and models
    Fault(
        "Beam search leaves a sentence although a longer hypothesis could still be the best.",
        "suite/decoding/beam.py",
        "self._divisor(self._limits)",
        "self._divisor(torch.tensor(self._tokens.shape[2]))",
    ),
    Fault(
        "BLEU is the mean over sentences and not that of the corpus.",
        "suite/evaluation/scores.py",
        "metric.corpus_score(translations, [references]).score",
        "sum(metric.sentence_score(own, [its]).score for own, its in zip(translations, references, strict=True))"
        " / len(references)",
    ),
    Fault(
        "In packed rows a target token attends to the next one, which it must predict.",
        "models/masks.py",
        "sentence[:, sources:]).tril()",
        "sentence[:, sources:]).tril(1)",
    ),
    Fault(
        "In a packed row the positions of the second source sentence go on from those of the first.",
        "models/embedding.py",
        "self.embed(source, positions=positions)",
        "self.embed(source)",
    ),
    Fault(
        "The reported negative log likelihood includes the label smoothing.",
        "models/loss.py",
        "torch.where(scored, nll, 0).sum()",
        "torch.where(scored, nll.lerp(uniform_nll, smoothing), 0).sum()",
    ),
    Fault(
        "When a sentence is done, those behind it go on with the source of another one.",
        "suite/decoding/kv_cache.py",
        "tensor.index_select(0, kept)",
        "tensor[: len(kept)]",
    ),
    Fault(
        "The test of two models counts one tail, so chance passes for a difference twice as often.",
        "suite/evaluation/bootstrap.py",
        "np.abs(sampled - sampled.mean()) >=",
        "(sampled - sampled.mean()) >=",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # experiments
    Fault(
        "A folder whose embedding and output matrix differ is loaded as if they were tied.",
        "experiments/huggingface/causal_lm.py",
        "one.read().float().equal(two.read().float())",
        "one.shape == two.shape",
    ),
    Fault(
        "A plan counts the memory of the first micro-batch, which is the smallest and not the largest.",
        "experiments/translation/sample.py",
        "max(parts, key=_padded_tokens)",
        "parts[0]",
    ),
    # -----------------------------------------------------------------------------------------------------------------
    # runs, workers and restarts
    Fault(
        "Restarts never end where failures differ, although no checkpoint is written between them.",
        "launch/supervision/supervisor.py",
        "start > self._start",
        "start >= self._start",
    ),
    Fault(
        "An exception in a layer is hidden behind the stall that it causes.",
        "launch/supervision/failure.py",
        " and not isinstance(error, ProgramError):",
        ":",
    ),
    Fault(
        "A worker that ends with exit code 0 and without a result is never missed.",
        "launch/backends/processes.py",
        "p.exitcode is not None and rank not in reported",
        "p.exitcode and rank not in reported",
    ),
    Fault(
        "A run that was sent back to an earlier checkpoint goes on from the later one after a crash.",
        "launch/worker/loading.py",
        "checkpoint.abandon_later(storage, step)",
        "pass",
    ),
    Fault(
        "The model that a user loads from a run is in training mode, so dropout is on.",
        "launch/inference/model.py",
        "return model.eval()",
        "return model",
    ),
    Fault(
        "Nats are reported as bits per byte.",
        "launch/runs/record.py",
        "nats / math.log(2) / bytes_per_unit",
        "nats / bytes_per_unit",
    ),
    Fault(
        "A heartbeat leaves the end of a longer one before it in the file, so a worker that is well seems silent.",
        "launch/worker/heartbeat.py",
        ".ljust(_SIZE)",
        "",
    ),
)
