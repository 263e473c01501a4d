"""Converts the layers of a Transformer-L to the exported model, its tokenizer and its card.

layer 0          -> embedding
layers 1 .. L    -> blocks.0 .. L-1
layer L + 1      -> project
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from experiments.huggingface.convert import with_template
from experiments.huggingface.modeling_gpipe_language_model import GPipeLanguageModel, GPipeLanguageModelConfig
from experiments.language_model.experiment import LanguageModelExperiment
from suite.data.documents.tokenizer import END, END_ID, PAD, PAD_ID
from suite.data.documents.tokens import TokenData

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpipe-suite]
---

# {name}

A decoder-only Transformer, {layers} blocks of width {width}, {parameters:,} parameters, trained for {step} steps by the
GPipe suite (`{name}` at scale `{scale}`) on `{corpus}`: {tokens:,} tokens, rows of {length}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
prompt = tokenizer("Returns the", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0], skip_special_tokens=True))
```

The model has seen no position past {length}. It takes no padding at the left: prompts of a batch need equal lengths.
"""


def save_language_model(
    folder: Path,
    experiment: LanguageModelExperiment,
    data: TokenData,
    step: int,
    layers: Mapping[int, Mapping[str, Tensor]],
) -> int:
    """Writes weights, code, tokenizer and card; returns the number of parameters."""
    model = exported_language_model(experiment, layers)
    model.config.register_for_auto_class()  # type: ignore[no-untyped-call]
    model.register_for_auto_class("AutoModelForCausalLM")  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    # as in training a document, a text begins with the end token
    with_template(
        data.tokenizer, f"{END} $A", (END, END_ID), pad_token=PAD, bos_token=END, eos_token=END
    ).save_pretrained(folder)
    shape, parameters = experiment.model, int(model.num_parameters())
    card = _CARD.format(
        name=experiment.name, layers=shape.layers, width=shape.width, parameters=parameters, step=step,
        scale=experiment.scale, corpus=data.corpus, tokens=len(data.train), length=experiment.text.length,
    )  # fmt: skip
    (folder / "README.md").write_text(card)
    return parameters


def exported_language_model(
    experiment: LanguageModelExperiment, layers: Mapping[int, Mapping[str, Tensor]]
) -> GPipeLanguageModel:
    """Returns the model with the values of each layer by name. Raises RuntimeError for an unknown name."""
    shape = experiment.model
    ids: dict[str, Any] = {"pad_token_id": PAD_ID, "bos_token_id": END_ID, "eos_token_id": END_ID}
    model = GPipeLanguageModel(
        GPipeLanguageModelConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.feed_forward,
            max_position_embeddings=experiment.text.length,
            **ids,
        )
    )
    last = shape.list_length - 1

    def exported_name(layer: int, name: str) -> str:
        return f"embedding.{name}" if layer == 0 else name if layer == last else f"blocks.{layer - 1}.{name}"

    model.load_state_dict(
        {exported_name(layer, name): value for layer in layers for name, value in layers[layer].items()}
    )
    model.generation_config = GenerationConfig(max_new_tokens=40, **ids)  # type: ignore[no-untyped-call]
    return model
