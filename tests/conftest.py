"""Offline switches for every test, before anything that reads them is imported."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", WANDB_MODE="offline", WANDB_SILENT="true",
    RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", DS_ACCELERATOR="cpu",
    CUDA_VISIBLE_DEVICES="",
)  # fmt: skip

import hypothesis

# a machine that is busy with other work is no fault of an example
hypothesis.settings.register_profile("any-speed", deadline=None)
hypothesis.settings.load_profile("any-speed")

LONG = (
    "launch/test_end_to_end.py", "launch/test_cli.py", "experiments/test_scales.py",
    "launch/test_image_run.py", "pipeline/test_gradients.py", "launch/test_gpu_check.py",
    "experiments/test_planning.py", "launch/test_same_at_every_k.py", "pipeline/test_batchnorm.py",
    "training/test_training.py", "experiments/test_peers.py", "launch/test_bench.py", "pipeline/test_memory.py",
)  # fmt: skip
"""The files that take longest, longest first."""


def pytest_collection_modifyitems(items):
    """Long files come first: one that began last would keep one process busy and leave the other idle."""
    rank = {name: at for at, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get("/".join(item.path.parts[-2:]), len(LONG)))
