"""AmoebaNet-D on images: the paper's ImageNet run, and one for two cores.

From the paper: (L, D) = (18, 512), 480 x 480 pixels, 4 partitions. (Its own model is AmoebaNet-B, 557M parameters; D of
this size has 481M.) From the authors' published code: RMSProp with decay and momentum 0.9 and epsilon 1, a rate of
0.015 that falls by 0.97 every 2.4 epochs after 3 of warm-up, weight decay 4e-5, gradients bounded at 10, label
smoothing 0.1, BatchNorm's decay 0.9997. Ours, because nobody prints them: mini-batches of 1024, R = 1, M = 64, 300
epochs. Left out: the auxiliary head, dropped connections, and moving averages of the weights. torch's RMSProp adds
epsilon to the root of the mean square, TensorFlow's to the mean square under it, so 1 is not quite the same number.
"""

from __future__ import annotations

import re

from experiments.images.experiment import ImageExperiment
from models.amoebanet import AmoebaNetShape
from suite.settings import ImageSettings, ImageTrainSettings, OptimizerSettings, PipelineSettings

IMAGENET, IMAGENET_IMAGES = "ILSVRC/imagenet-1k", 1_281_167
BATCH = 1024
EPOCH = IMAGENET_IMAGES / BATCH
"""Steps."""


def amoebanet_imagenet() -> ImageExperiment:
    """AmoebaNet-D(18, 512) on ImageNet at 480 x 480, over 4 stages: the run behind the paper's Table 4."""
    return ImageExperiment(
        name="amoebanet_imagenet",
        scale="paper",
        model=AmoebaNetShape(layers=18, filters=512),
        images=ImageSettings(source=IMAGENET, size=480, fit="resize", crop="random_resized_crop", flip=True),
        pipeline=PipelineSettings(stages=4, micro_batches=64, remat="auto"),
        optimizer=OptimizerSettings(
            name="rmsprop",
            learning_rate=0.015,
            warmup_steps=round(3 * EPOCH),
            lr_decay="exponential",
            lr_decay_steps=round(2.4 * EPOCH),
            lr_decay_factor=0.97,
            beta1=0.9,
            beta2=0.9,
            epsilon=1.0,
            weight_decay=4e-5,
            max_grad_norm=10.0,
            precision="bf16",
        ),
        train=ImageTrainSettings(steps=round(300 * EPOCH), batch_images=BATCH, checkpoint_every=1000),
    )


def amoebanet_fashion() -> ImageExperiment:
    """AmoebaNet-D(3, 32) on Fashion-MNIST, 28 x 28, over 2 stages: minutes on two cores, 88% and more."""
    steps = 600
    return ImageExperiment(
        name="amoebanet_fashion",
        scale="laptop",
        model=AmoebaNetShape(layers=3, filters=32, classes=10, channels=1, stem="small", norm_decay=0.9),
        images=ImageSettings(source="fashion", size=28, flip=True, crop="random_shift"),
        pipeline=PipelineSettings(stages=2, micro_batches=4, remat="auto"),
        optimizer=OptimizerSettings(
            name="adamw", learning_rate=3e-3, warmup_steps=30, lr_decay="cosine", lr_decay_steps=steps - 30, beta2=0.99
        ),
        train=ImageTrainSettings(steps=steps, batch_images=128, checkpoint_every=200),
    )


TABLE_SIZE, TABLE_BATCH = 224, 128
"""Table 1 has images of 224 x 224 and mini-batches of 128."""


def find_amoebanet(name: str, devices: int) -> ImageExperiment | None:
    """Returns ``amoebanet_<L>x<D>`` of Table 1 with one stage per device; None for any other name.

    Micro-batches have one image unless set, for the least memory per stage. Raises SettingError when no AmoebaNet-D has
    these numbers.
    """
    match = re.fullmatch(r"amoebanet_([0-9]{1,4})x([0-9]{1,6})", name)
    if match is None:
        return None
    values = {
        "name": name,
        "scale": "paper",
        "model": {"layers": int(match[1]), "filters": int(match[2])},
        "images": ImageSettings(source=IMAGENET, size=TABLE_SIZE),
        "pipeline": PipelineSettings(),
        "optimizer": OptimizerSettings(name="rmsprop", beta2=0.9),
        "train": ImageTrainSettings(batch_images=TABLE_BATCH, steps=100_000),
    }
    run = ImageExperiment.validated(values)
    stages = max(1, min(devices, run.list_length))
    return run.with_pipeline(PipelineSettings(stages=stages, micro_batches=TABLE_BATCH, remat="auto"))
