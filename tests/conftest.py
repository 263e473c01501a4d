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
