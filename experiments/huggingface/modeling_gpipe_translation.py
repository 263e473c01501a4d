"""A multilingual encoder-decoder Transformer of the GPipe suite, for ``transformers``.

This file is exported with the weights, together with the one that it imports. Pre-LayerNorm; sinusoidal positions;
attention heads of any width; source and target share the embedding matrix, and the softmax has its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from .modeling_gpipe_layers import Attention, Block, FeedForward, with_positions


class GPipeTranslationConfig(PreTrainedConfig):
    """Shape and special tokens. Each stack has ``num_hidden_layers``. ``logit_clip`` bounds the logits, unless None."""

    model_type = "gpipe_translation"

    vocab_size: int = 64000
    hidden_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    head_dim: int = 64
    intermediate_size: int = 8192
    logit_clip: float | None = 30.0
    max_tokens: int = 64
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3
    decoder_start_token_id: int | None = 2


class DecoderLayer(nn.Module):
    def __init__(self, config: GPipeTranslationConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config, index, cross=False)
        self.source_norm = nn.LayerNorm(config.hidden_size)
        self.source = Attention(config, index, cross=True)
        self.feed_norm = nn.LayerNorm(config.hidden_size)
        self.feed = FeedForward(config)

    def forward(self, y: Tensor, memory: Tensor, visible: Tensor, past: EncoderDecoderCache | None) -> Tensor:
        y = y + self.attention(self.attention_norm(y), causal=True, past=past)
        y = y + self.source(self.source_norm(y), memory, visible, past=past)
        return y + self.feed(self.feed_norm(y))


class Encoder(nn.Module):
    """Also holds the vocabulary matrix, which the decoder reads too."""

    main_input_name = "input_ids"

    def __init__(self, config: GPipeTranslationConfig) -> None:
        super().__init__()
        self.padding = config.pad_token_id
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def embed(self, ids: Tensor, start: int = 0) -> Tensor:
        """(batch, time) -> (batch, time, width), positions from ``start`` on."""
        return with_positions(self.embedding(ids), start)

    def padding_mask(self, ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """True where attention over the source may look."""
        present = mask.bool() if mask is not None else ids != self.padding
        return present | ~present.any(dim=1, keepdim=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object) -> BaseModelOutput:
        x, visible = self.embed(input_ids), self.padding_mask(input_ids, attention_mask)
        for layer in self.layers:
            x = layer(x, visible)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class Head(nn.Module):
    def __init__(self, config: GPipeTranslationConfig) -> None:
        super().__init__()
        self.clip = config.logit_clip
        self.norm = nn.LayerNorm(config.hidden_size)
        self.project = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, y: Tensor) -> Tensor:
        logits = self.project(self.norm(y))
        return logits if self.clip is None else logits.clamp(-self.clip, self.clip)


class GPipeTranslationModel(PreTrainedModel, GenerationMixin):
    """Source ``<2xx> ... </s>``, where ``<2xx>`` names the language to write."""

    config_class = GPipeTranslationConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ("Block", "DecoderLayer")

    def __init__(self, config: GPipeTranslationConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.decoder = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.head = Head(config)
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head.project

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        labels: Tensor | None = None,
        **_: object,
    ) -> Seq2SeqLMOutput:
        """Returns logits (batch, time, vocabulary), and with ``labels`` (batch, time), -100 where masked, the loss."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        memory = encoder_outputs[0]
        if input_ids is None and attention_mask is None:
            attention_mask = torch.ones(memory.shape[:2], device=memory.device)
        visible = self.encoder.padding_mask(input_ids, attention_mask)
        if decoder_input_ids is None:
            targets = labels.masked_fill(labels == -100, self.config.pad_token_id)
            decoder_input_ids = F.pad(targets[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        y = self.encoder.embed(decoder_input_ids, past_key_values.get_seq_length() if past_key_values else 0)
        for layer in self.decoder:
            y = layer(y, memory, visible, past_key_values)
        logits = self.head(y)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(
            loss=loss, logits=logits, past_key_values=past_key_values, encoder_last_hidden_state=memory
        )
