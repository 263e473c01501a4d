"""Transformer-L of section 3 of the paper (Tables 1 to 3): a decoder-only language model, ``transformer_<L>``.

From the paper: the layer, the vocabulary, sequences of 1024 tokens, mini-batches of 32, K of Table 1. The paper trains
these models only to count bytes and seconds. So the rest is ours: the text; M = 32, micro-batches of one sequence, for
the least memory per stage; AdamW at the rate of GPT-3's 760M and 1.3B models (Brown et al. 2020, table 2.1: 2.5e-4 and
2e-4); bf16, as in the translation runs; 100,000 steps. Table 1 is computed for fp32 (``experiments.tables``).
"""

from __future__ import annotations

import re

from experiments.language_model.experiment import LanguageModelExperiment
from models.shape import LanguageModelShape
from suite.settings import DocumentSettings, DocumentTrainSettings, OptimizerSettings, PipelineSettings

SEQUENCES = 32
"""Sequences of a mini-batch (Table 1)."""
BLOCKS_PER_STAGE = 13
"""Blocks that fill a device of Table 1 (TPUv3, 16 GiB): L = 13, 103, 415 and 1663 have K = 1, 8, 32 and 128."""


def transformer_13() -> LanguageModelExperiment:
    """Transformer-13, 786M parameters: the largest in Table 1 on one device."""
    return transformer(13)


def transformer_103() -> LanguageModelExperiment:
    """Transformer-103, 5.3B parameters: the largest in Table 1 on 8 devices."""
    return transformer(103)


def transformer_1663() -> LanguageModelExperiment:
    """Transformer-1663, 83.9B parameters: the largest of the paper, on 128 devices."""
    return transformer(1663)


def transformer(layers: int) -> LanguageModelExperiment:
    """Returns Transformer-L with the paper's numbers."""
    return LanguageModelExperiment(
        name=f"transformer_{layers}",
        scale="paper",
        model=LanguageModelShape(layers),
        text=DocumentSettings(vocabulary=32_000, length=1024),
        pipeline=PipelineSettings(stages=-(-layers // BLOCKS_PER_STAGE), micro_batches=SEQUENCES, remat="auto"),
        optimizer=OptimizerSettings(learning_rate=2e-4, warmup_steps=2000, precision="bf16"),
        train=DocumentTrainSettings(
            steps=100_000, batch_sequences=SEQUENCES, checkpoint_every=1000, valid_sequences=1024
        ),
    )


def language_model(shape: LanguageModelShape, pipeline: PipelineSettings) -> LanguageModelExperiment:
    """Returns a model that is only planned or measured, with the default optimizer."""
    return transformer(shape.blocks_per_stack).model_copy(
        update={
            "model": shape,
            "text": DocumentSettings(vocabulary=shape.vocabulary, length=shape.context_length),
            "pipeline": pipeline,
            "optimizer": OptimizerSettings(),
        }
    )


def find_transformer(name: str) -> LanguageModelExperiment | None:
    """Returns ``transformer_<L>``; None for any other name."""
    match = re.fullmatch(r"transformer_([1-9]\d{0,5})", name)
    return None if match is None else transformer(int(match[1]))
