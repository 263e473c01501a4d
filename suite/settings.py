"""What can be set of the engine, as frozen typed records. An experiment is made of them; each field is a ``SET=`` path.

Times are in seconds, sizes in bytes. Unknown fields and wrong types are refused by pydantic; the registry turns that
into one sentence naming the field.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Remat = Literal["always", "except_last", "never", "auto"]
ScheduleName = Literal["fill_drain", "1f1b", "interleaved", "zero_bubble", "auto"]


class Frozen(BaseModel):
    """A record that cannot change once made and has no fields beyond its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PipelineSettings(Frozen):
    """K and M, which the paper asks of a user with the layer list, and what this suite adds: replicas, schedule,
    recomputation."""

    stages: int = Field(1, ge=1, description="K, devices that the model is cut over")
    micro_batches: int = Field(4, ge=1, description="M, micro-batches a replica cuts its share of a mini-batch into")
    replicas: int = Field(1, ge=1, description="R, copies of the whole pipeline")
    schedule: ScheduleName = Field(
        "fill_drain", description="who does what when: the paper's fill_drain, 1f1b, interleaved, zero_bubble; "
        "auto: whichever is fastest of those that fit the memory"
    )  # fmt: skip
    turns: int = Field(1, ge=1, description="cells a stage holds; more than 1 only with interleaved and zero_bubble")
    remat: Remat = Field(
        "except_last", description="which micro-batches run their forward again in the backward pass: never; "
        "except_last: all but one at a time, in fill_drain the last; always; auto: as few as the memory forces"
    )  # fmt: skip
    cells: tuple[int, ...] | None = Field(None, description="layers in each cell, by hand; otherwise cut by cost")


class OptimizerSettings(Frozen):
    """One update rule for all stages."""

    name: Literal["adamw", "adafactor", "rmsprop"] = "adamw"
    learning_rate: float = Field(
        1e-3, gt=0, description="peak rate, reached at the end of warm-up; Adafactor's is relative to a parameter's "
        "size and never above 1/sqrt(step)"
    )  # fmt: skip
    warmup_steps: int = Field(40, ge=1, description="linear warm-up, then as decay says")
    decay: Literal["inverse_sqrt", "exponential", "cosine"] = Field(
        "inverse_sqrt", description="1/sqrt(step); by decay_factor every decay_steps; a half cosine of decay_steps to 0"
    )
    decay_steps: int = Field(1000, ge=1, description="of exponential and cosine, counted from the end of warm-up")
    decay_factor: float = Field(0.97, gt=0, le=1, description="of exponential")
    clip_norm: float | None = Field(1.0, gt=0, description="bound of the gradient norm over all stages")
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1, description="of AdamW's mean gradient; RMSProp's momentum")
    beta2: float = Field(0.98, gt=0, lt=1, description="of the mean square")
    epsilon: float = Field(1e-9, gt=0, description="added to the root of the mean square")
    precision: Literal["fp32", "bf16"] = "fp32"


class TextSettings(Frozen):
    """Which text, and how it is cut and drawn."""

    corpus: str = Field("catalogues", description="catalogues, django, or the name of a translation set on the hub")
    vocabulary: int = Field(8000, ge=300, description="entries of the vocabulary shared by all languages")
    temperature: float = Field(5.0, gt=0, description="T of p_l ~ D_l^(1/T), D_l the pairs of language l")
    max_tokens: int = Field(64, ge=4, description="longest side of a pair; longer pairs are left out")
    languages: tuple[str, ...] | None = Field(
        None, min_length=1, description="those beside English that are drawn, otherwise all; vocabulary, split and "
        "test text stay those of the whole corpus"
    )  # fmt: skip


class LoopSettings(Frozen):
    """How long, and what is written on the way."""

    steps: int = Field(100, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step always writes one")
    checkpoints: str | None = Field(
        None, pattern="^(/|[a-z0-9]+://)", description="where they go: a folder from / on, or a URL such as "
        "s3://bucket/runs, each run below it by its name and id; otherwise the run's own folder"
    )  # fmt: skip
    bad_steps_allowed: int = Field(3, ge=0, description="steps in a row with non-finite gradients that are skipped")
    sharpness_every: int | None = Field(
        None, ge=1, description="steps between records of each layer's gradient norm and kurtosis; otherwise none"
    )
    threads: int | None = Field(None, ge=1, description="compute threads a stage; otherwise cores / stages")
    restarts: int = Field(10, ge=0, description="faults survived without a new checkpoint between them; 0 for none")
    wait_for_devices: float = Field(
        60.0,
        ge=0,
        description="seconds that a run waits for devices that others hold or that are to come",
    )
    elastic: bool = Field(False, description="whether a run goes on with a smaller K or R when devices are lost")


class TrainSettings(LoopSettings):
    """Training on text."""

    batch_tokens: int = Field(4096, ge=16, description="target tokens of one mini-batch over all replicas, about")
    valid_pairs: int = Field(512, ge=1, description="held-out pairs scored at the end")


class ImageSettings(Frozen):
    """Which images, and how they are shown."""

    source: str = Field(
        "fashion", description="fashion, mnist, digits, a folder in MNIST's layout, or the name of a set on the hub"
    )
    size: int = Field(28, ge=4, description="height and width that the model gets")
    fit: Literal["exact", "resize"] = Field(
        "exact", description="exact: every image has this size; resize: the shorter side is made so, the middle is kept"
    )
    crop: Literal["none", "shift", "area"] = Field(
        "none", description="shift: moved by up to an eighth; area: a part of 8% to 100% of it, made this size"
    )
    flip: bool = Field(False, description="half of the images, left to right")
    cutout: int = Field(0, ge=0, description="side of a square that is made grey; 0 for none")


class ImageTrainSettings(LoopSettings):
    """Training on images."""

    batch_images: int = Field(128, ge=1, description="images of one mini-batch over all replicas")
    test_images: int | None = Field(None, ge=1, description="held-out images scored at the end; otherwise all")
    averages_over_replicas: bool = Field(
        True, description="BatchNorm's moving averages are of all replicas' images, or of each one's own"
    )
    start_from: str | None = Field(None, description="a run's folder whose weights this one begins with, but the last")


class TrackingSettings(Frozen):
    """Where the record of a run goes beside its own folder."""

    wandb: Literal["auto", "online", "offline", "disabled"] = Field("auto", description="auto: online with a key")
    project: str = "gpipe-suite"
