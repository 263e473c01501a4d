"""The waits of the host for its device that are meant, each with its reason. None is in an action."""

MEANT = {
    ("suite/training/stage_optimizer.py:_all_reduce_norms", "a value"): "norms and losses, by which all workers decide",
    ("suite/pipeline/runtime/executor.py:train", "a value"): "the loss of a step",
    ("suite/pipeline/runtime/executor.py:evaluate", "a value"): "the losses of a held-out mini-batch",
    ("suite/training/validation.py:evaluate", "a copy from the device"): "the figures of a validation",
    ("suite/pipeline/model/batchnorm.py:_over_replicas", "a value"): "the counts of all norms, once a step of replicas",
    ("suite/training/checkpoint/writing.py:_to_host", "a copy from the device"): "a checkpoint's tensors",
    ("suite/training/layer_stats.py:write", "a value"): "statistics of layers, in the steps that record them",
    ("suite/pipeline/runtime/recorder.py:begin", "all work"): "a traced step begins when the device is idle",
    ("suite/pipeline/runtime/recorder.py:spans", "all work"): "a trace is read when all its events have happened",
    ("suite/training/trace.py:bubble", "a copy from the device"): "the bubble of a traced step",
    ("suite/decoding/beam.py:advance", "a copy from the device"): "the best extensions, once a token",
    ("suite/decoding/forced.py:advance", "a value"): "the probabilities of the targets, once a token",
    (
        "suite/decoding/sampling.py:advance",
        "a copy from the device",
    ): "logits, once a token: prompts have generators of the host",
}


def faults_of(waits):
    """Returns the waits that are not meant."""
    return [(place, what, in_action) for place, what, in_action in waits if in_action or (place, what) not in MEANT]
