"""Converts the suite's list of layers to the exported model, and its tokenizer.

layer 0          the source's embedding      -> encoder.embedding      (the target's is the same matrix)
layers 1 .. L    encoder layers              -> encoder.layers.0 .. L-1
layer L + 1      the target's embedding      -> encoder.norm
then             decoder layers, head        -> decoder.0 .. L-1, head
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from experiments.huggingface.modeling_gpipe_translation import GPipeTranslationConfig, GPipeTranslationModel
from experiments.translation.experiment import TranslationExperiment
from suite.data.text.text import TextData
from suite.data.text.tokenizer import BEGIN, BEGIN_ID, END, END_ID, ENGLISH, PAD, PAD_ID, UNKNOWN, language_token


def exported_name(layer: int, name: str, depth: int) -> str | None:
    """Returns the name of a layer's tensor in the exported model of ``depth`` layers per stack; None for the second
    copy of the embedding matrix."""
    if layer == 0:
        return f"encoder.embedding.{name}"
    if layer <= depth:
        return f"encoder.layers.{layer - 1}.{name}"
    if layer == depth + 1:
        return f"encoder.norm.{name.removeprefix('memory_norm.')}" if name.startswith("memory_norm.") else None
    return f"decoder.{layer - depth - 2}.{name}" if layer < 2 * depth + 2 else f"head.{name}"


def exported_model(
    experiment: TranslationExperiment, layers: Mapping[int, Mapping[str, Tensor]]
) -> GPipeTranslationModel:
    """Returns the model with the values of each layer by name. Raises RuntimeError for an unknown name."""
    shape = experiment.model
    ids: dict[str, Any] = {
        "pad_token_id": PAD_ID,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "decoder_start_token_id": BEGIN_ID,
    }
    config = GPipeTranslationConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, head_dim=shape.head_width, intermediate_size=shape.feed_forward,
        logit_clip=shape.logit_clip, max_tokens=experiment.text.max_length, **ids,
    )  # fmt: skip
    model = GPipeTranslationModel(config)
    values = {
        exported: tensor
        for layer, tensors in layers.items()
        for name, tensor in tensors.items()
        if (exported := exported_name(layer, name, shape.layers)) is not None
    }
    model.load_state_dict(values)
    model.generation_config = GenerationConfig(max_new_tokens=config.max_tokens, **ids)  # type: ignore[no-untyped-call]
    return model


def exported_tokenizer(data: TextData) -> PreTrainedTokenizerFast:
    """Returns the tokenizer. It appends the end token that the model expects: ``<2de>Save`` is enough."""
    languages = [language_token(language) for language in sorted({ENGLISH, *data.languages})]
    return with_template(
        data.tokenizer,
        f"$A {END}",
        (END, END_ID),
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=languages,
    )


def with_template(
    tokenizer: PreTrainedTokenizerFast, template: str, special: tuple[str, int], **tokens: Any
) -> PreTrainedTokenizerFast:
    """Returns a copy of a tokenizer that puts a text into ``template``, where it is ``$A``."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single=template, special_tokens=[special])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )
