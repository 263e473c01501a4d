"""Transformer-L, a decoder-only language model of the GPipe suite, for ``transformers``.

This file is exported with the weights, together with the one that it imports. Pre-LayerNorm; no LayerNorm after the
last block; sinusoidal positions; the softmax has a bias and shares no matrix with the embedding.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .modeling_gpipe_layers import Block, with_positions


class GPipeLanguageModelConfig(PreTrainedConfig):
    """Shape and special tokens. ``max_position_embeddings`` is the length of the rows that it was trained on."""

    model_type = "gpipe_language_model"

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 3
    num_attention_heads: int = 32
    intermediate_size: int = 8192
    max_position_embeddings: int = 1024
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 1

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class GPipeLanguageModel(PreTrainedModel, GenerationMixin):
    """Continues a text. A document begins after the token ``<|endoftext|>``, which the tokenizer adds."""

    config_class = GPipeLanguageModelConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ("Block",)

    def __init__(self, config: GPipeLanguageModelConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.project = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.project

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **_: object,
    ) -> CausalLMOutputWithPast:
        """Returns logits (batch, time, vocabulary), and with ``labels`` (batch, time), -100 where masked, the loss.

        Raises ValueError for padding at the left; at the right no token attends to it.
        """
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("this model takes no padding at the left: generate from prompts of equal length")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        x = with_positions(self.embedding(input_ids), past_key_values.get_seq_length() if past_key_values else 0)
        for block in self.blocks:
            x = block(x, causal=True, past=past_key_values)
        logits = self.project(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
