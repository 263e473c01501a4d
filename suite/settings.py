"""The engine's settings, as frozen typed records. An experiment is made of them; each field is a ``SET=`` path.

The docstring of a field is its description in ``gpipe settings`` and docs/settings.md, ``Unit`` its unit. Pydantic
rejects unknown fields and wrong types; ``experiments.base.overrides`` says so in a sentence that names the field.
"""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Unit
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator

Remat = Literal["always", "except_last", "never", "auto"]
ScheduleName = Literal[
    "fill_drain", "1f1b", "interleaved", "zero_bubble", "zbv", "v_half", "v_min", "csv", "search", "auto"
]

AUTO = 0
"""The value of ``pipeline.micro_batches`` until the plan has chosen it. A run's saved experiment never has it."""

MicroBatches = Annotated[
    int,
    BeforeValidator(lambda value: AUTO if value == "auto" else value),
    PlainSerializer(lambda count: count or "auto"),
]


class FrozenRecord(BaseModel):
    """An immutable record that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class PipelineSettings(FrozenRecord):
    """K and M, the paper's two settings beside the layer list, and what this suite adds: replicas, schedule, remat."""

    stages: int = Field(1, ge=1)
    """K: pipeline stages, each on one device."""
    micro_batches: MicroBatches = Field(4, ge=AUTO)
    """M: accumulated micro-batches of a replica's mini-batch, also with one stage; auto: the plan chooses."""
    replicas: int = Field(1, ge=1)
    """R: data-parallel copies of the whole pipeline."""
    schedule: ScheduleName = "fill_drain"
    """fill_drain is the paper's, auto the fastest that fits. A path ending with .csv reads your own
    (docs/planning.md)."""
    schedule_rows: tuple[str, ...] | None = None
    """Actions of a schedule from a file, set with pipeline.schedule."""
    virtual_stages: int = Field(1, ge=1)
    """Cells per stage; over 1 only with interleaved, zero_bubble, csv and auto; 2 with zbv, v_half and v_min."""
    remat: Remat = "except_last"
    """Forwards that are recomputed: always all, never none, auto as few as memory allows, except_last as few as one
    live graph per cell allows (in fill_drain all but the last)."""
    layers_per_cell: tuple[int, ...] | None = None
    """Layers of each cell; none: balanced by cost."""
    memory_reserve: float | None = Field(None, ge=0, le=0.5)
    """Share of a device's memory that plans leave free; none: 0.05 of an accelerator, 0.3 of a CPU."""


class OptimizerSettings(FrozenRecord):
    """The optimizer of all stages."""

    name: Literal["adamw", "adafactor", "rmsprop", "sgd"] = "adamw"
    """Update rule."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak rate, after warm-up. Adafactor multiplies it by a parameter's root mean square and bounds it by
    1/sqrt(step)."""
    warmup_steps: Annotated[int, Unit("steps")] = Field(40, ge=1)
    """Linear warm-up."""
    lr_decay: Literal["inverse_sqrt", "exponential", "cosine", "linear", "constant", "wsd"] = "inverse_sqrt"
    """After warm-up: 1/sqrt(step), lr_decay_factor every lr_decay_steps, a half cosine or line to 0, none, or wsd:
    lr_stable_steps at the peak, then a line to 0."""
    lr_decay_steps: Annotated[int, Unit("steps")] = Field(1000, ge=1)
    """Period of exponential decay, or length of the decay to 0; unless set, cosine and linear fill the run after
    warm-up, wsd its last tenth."""
    lr_stable_steps: Annotated[int, Unit("steps")] = Field(0, ge=0)
    """wsd's stable phase; unless set, the decay ends with the run."""
    lr_decay_factor: float = Field(0.97, gt=0, le=1)
    """Factor of exponential decay."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Bound of the gradient norm over all stages; none: no clipping."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's mean gradient; momentum of RMSProp and SGD."""
    beta2: float = Field(0.98, gt=0, lt=1)
    """Decay of the mean squared gradient."""
    epsilon: float = Field(1e-9, gt=0)
    """Term added to the root of the mean square."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Forward and backward; bf16 is autocast with fp32 parameters."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state that has a value per parameter value, in torch's optimizer; ZeRO shards it. None for
        Adafactor."""
        momentum = ("momentum_buffer",) if self.beta1 > 0 else ()
        return {
            "adamw": ("exp_avg", "exp_avg_sq"),
            "adafactor": (),
            "rmsprop": ("square_avg", *momentum),
            "sgd": momentum,
        }[self.name]


class TextSettings(FrozenRecord):
    """Which text, and how it is tokenized and sampled."""

    corpus: str = "catalogues"
    """catalogues, django, a folder of your own (docs/own-data.md), or a translation set on the Hugging Face hub."""
    vocabulary: Annotated[int, Unit("tokens")] = Field(8000, ge=300)
    """Vocabulary shared by all languages."""
    temperature: float = Field(5.0, gt=0)
    """T in p_l ~ D_l^(1/T), the probability of language l with D_l pairs."""
    max_length: Annotated[int, Unit("tokens")] = Field(64, ge=4, le=1_000_000)
    """Longest side of a pair; longer ones are dropped."""
    clean: bool = True
    """Whether a folder of your own text is cleaned; other corpora always are."""
    corpus_languages: tuple[str, ...] | None = Field(None, min_length=1)
    """Languages kept beside English, for the vocabulary too; none: all. The split stays that of the whole corpus."""
    languages: tuple[str, ...] | None = Field(None, min_length=1)
    """Languages trained on beside English; none: all. Vocabulary, split and test text do not change."""
    train_pairs: tuple[str, ...] | None = Field(None, min_length=1)
    """Training pairs of languages, such as gl:500, drawn by train.seed; none: all. Vocabulary and held-out text do not
    change."""

    @field_validator("train_pairs")
    @classmethod
    def _are_counts(cls, limits: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for limit in limits or ():
            language, _, count = limit.partition(":")
            if not (language and count.isascii() and count.isdecimal() and int(count) > 0):
                raise ValueError(
                    f"it should be languages with counts, such as gl:500,es:20000, and {limit!r} is not one"
                )
        languages = [limit.partition(":")[0] for limit in limits or ()]
        if len(set(languages)) < len(languages):
            raise ValueError("it should have each language once")
        return limits


class DocumentSettings(FrozenRecord):
    """Which documents a language model reads, and how they are tokenized and cut."""

    corpus: str = "docstrings"
    """docstrings, django, or a folder of your own (docs/language-model.md)."""
    vocabulary: Annotated[int, Unit("tokens")] = Field(8000, ge=2)
    """Vocabulary, 258 or more: 256 bytes and two special tokens."""
    length: Annotated[int, Unit("tokens")] = Field(128, ge=2)
    """Length of a row, the model's context."""


class LoopSettings(FrozenRecord):
    """How long a run trains, and what it writes on the way."""

    steps: Annotated[int, Unit("steps")] = Field(100, ge=1)
    """Length of the run."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial weights, dropout and data order."""
    checkpoint_every: Annotated[int, Unit("steps")] = Field(50, ge=1)
    """Interval of checkpoints; the last step writes one too, but for `gpipe check` and `gpipe diff`."""
    checkpoint_minutes: Annotated[float | None, Unit("minutes")] = Field(None, gt=0)
    """Longest time between checkpoints; none: only the interval in steps."""
    init_from: str | None = None
    """Folder or id of a run whose best, otherwise latest, checkpoint has the initial weights. The last layer starts
    anew on images, and where shapes differ."""
    checkpoint_dir: str | None = Field(None, pattern="^(/|[a-z0-9]+://)")
    """Absolute folder or URL, such as s3://bucket/runs, for checkpoints by run name and id; none: the run's folder."""
    max_nonfinite_steps: Annotated[int, Unit("steps")] = Field(3, ge=0)
    """Consecutive steps with non-finite gradients that are skipped; one more ends the run."""
    validate_every: Annotated[int | None, Unit("steps")] = Field(None, ge=1)
    """Interval of validations; none: only at the end. The best one's checkpoint is kept."""
    patience: Annotated[int | None, Unit("validations")] = Field(None, ge=1)
    """Validations in a row without improvement that end the run; none: no limit."""
    log_every: Annotated[int | None, Unit("steps")] = Field(None, ge=1)
    """Interval of printed lines without a terminal; none: a tenth of the run."""
    profile_steps: str | None = None
    """Steps that torch.profiler records, such as 20 or 20-23, counted from 1."""
    layer_stats_every: Annotated[int | None, Unit("steps")] = Field(None, ge=1)
    """Interval of records of each layer's gradient norm, kurtosis, size and update."""
    fingerprint_steps: Annotated[int, Unit("steps")] = Field(0, ge=0)
    """First steps after a start of which all layers' tensors are recorded for `gpipe diff` (docs/diff.md)."""
    threads: int | None = Field(None, ge=1)
    """Threads per stage; none: cores divided by workers."""
    max_restarts: int = Field(10, ge=0)
    """Restarts without a new checkpoint between them."""
    device_timeout_s: Annotated[float, Unit("seconds")] = Field(60.0, ge=0)
    """Longest wait for devices that are busy, missing or lost."""
    elastic: bool = False
    """Whether a run continues with a smaller K or R after devices are lost."""


class TrainSettings(LoopSettings):
    """Training loop on text."""

    batch_tokens: Annotated[int, Unit("tokens")] = Field(4096, ge=16, le=100_000_000)
    """Approximate target tokens of a mini-batch over all replicas."""
    valid_pairs: Annotated[int, Unit("pairs")] = Field(512, ge=1)
    """Held-out pairs of each validation."""


class DocumentTrainSettings(LoopSettings):
    """Training loop of a language model."""

    batch_sequences: Annotated[int, Unit("sequences")] = Field(32, ge=1, le=1_000_000)
    """Rows of a mini-batch over all replicas."""
    valid_sequences: Annotated[int | None, Unit("sequences")] = Field(None, ge=1)
    """Held-out rows of each validation; none: all."""


class ImageSettings(FrozenRecord):
    """Which images, and how they are resized and augmented."""

    source: str = "fashion"
    """fashion, mnist, digits, a folder of your own (docs/own-data.md), or a set on the Hugging Face hub."""
    size: Annotated[int, Unit("pixels")] = Field(28, ge=4)
    """Height and width of the model's input."""
    fit: Literal["exact", "resize"] = "exact"
    """exact requires images.size; resize scales the shorter side to it and crops the center."""
    crop: Literal["none", "random_shift", "random_resized_crop"] = "none"
    """random_shift moves by up to an eighth, random_resized_crop resizes a random 8% to 100%."""
    flip: bool = False
    """Whether half of the images are flipped left to right."""
    cutout: Annotated[int, Unit("pixels")] = Field(0, ge=0)
    """Side of a gray square over the image; 0: none."""


class ImageTrainSettings(LoopSettings):
    """Training loop on images."""

    batch_images: Annotated[int, Unit("images")] = Field(128, ge=1, le=1_000_000)
    """Images of a mini-batch over all replicas."""
    test_images: Annotated[int | None, Unit("images")] = Field(None, ge=1)
    """Evenly spaced held-out images; none: all."""
    sync_batchnorm_stats: bool = True
    """Whether BatchNorm's moving averages are over all replicas."""


class CustomTrainSettings(LoopSettings):
    """Training loop on a data set of your own."""

    batch_rows: Annotated[int, Unit("rows")] = Field(32, ge=1, le=100_000_000)
    """Rows of a mini-batch over all replicas; a function that returns mini-batches chooses its own."""
    valid_rows: Annotated[int | None, Unit("rows")] = Field(None, ge=1)
    """First held-out rows to evaluate; none: all."""
    sync_batchnorm_stats: bool = True
    """Whether BatchNorm's moving averages are over all replicas."""


class TrackingSettings(FrozenRecord):
    """Where metrics go besides the run's folder."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE, otherwise online with a key and offline without."""
    project: str = "gpipe-suite"
    """Project in wandb."""
    tensorboard: bool = False
    """Whether metrics also go to TensorBoard's event files."""
