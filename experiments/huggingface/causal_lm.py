"""A causal language model of transformers as a list of layers: GPT-2 and Llama configurations.

    ids -> embeddings -> block 0 -> block 1 -> ... -> block N-1 -> norm and output projection -> logits

Each layer holds modules of transformers' own model, so it computes what that model computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from suite.errors import SettingError, first_line

SUPPORTED = ("gpt2", "llama")


def causal_lm_layers(model: Any) -> list[nn.Module]:
    """Returns the layers of a causal language model; they share its parameters.

    A padded batch needs no mask where the padding is on the right: causal attention never looks there.

    Raises SettingError for a model of another type than ``SUPPORTED``.
    """
    kind = model.config.model_type
    if kind not in SUPPORTED:
        raise SettingError(
            f"a causal language model of type {kind} cannot be cut into layers; known: {', '.join(SUPPORTED)}"
        )
    if (attention := model.config._attn_implementation) != "sdpa":
        raise SettingError(
            f"the model's attention is {attention}, which needs a mask that the layers do not get; make it with "
            'attn_implementation="sdpa", the default'
        )
    # The blocks of these two types differ only in ``layer_idx``: their entry of a KV cache, and a factor of attention.
    structure = model.config.to_json_string()
    if kind == "gpt2":
        body = model.transformer
        first: nn.Module = Embeddings(body.wte, body.wpe, body.drop)
        blocks: list[nn.Module] = [Block(block, structure) for block in body.h]
        return [first, *blocks, Head(body.ln_f, model.lm_head)]
    body = model.model
    blocks = [RotaryBlock(block, type(body.rotary_emb)(model.config), structure) for block in body.layers]
    return [Embeddings(body.embed_tokens), *blocks, Head(body.norm, model.lm_head)]


class Embeddings(nn.Module):
    """Token embeddings, with those of positions and dropout where the model has them."""

    def __init__(self, tokens: nn.Module, positions: nn.Module | None = None, dropout: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = tokens, positions, dropout

    def forward(self, ids: Tensor) -> Tensor:
        """ids (batch, T) int64 -> (batch, T, width)."""
        embedded: Tensor = self.tokens(ids)
        if self.positions is not None:
            embedded = embedded + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.dropout(embedded) if self.dropout is not None else embedded


class Block(nn.Module):
    """A block that needs nothing but hidden states."""

    def __init__(self, block: nn.Module, structure: str) -> None:
        super().__init__()
        self.block, self.layer_structure = block, structure

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, T, width), the same."""
        return _first(self.block(hidden))


class RotaryBlock(nn.Module):
    """A block with rotary positions, which it computes itself: cheaper than sending them from stage to stage."""

    def __init__(self, block: nn.Module, rotary: nn.Module, structure: str) -> None:
        super().__init__()
        self.block, self.rotary, self.layer_structure = block, rotary, structure

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, T, width), the same."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embeddings = self.rotary(hidden, position_ids=positions)
        return _first(self.block(hidden, position_embeddings=embeddings, position_ids=positions))


class Head(nn.Module):
    """The last norm and the output projection."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm, self.projection = norm, projection

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, T, width) -> logits (batch, T, vocabulary)."""
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


def _first(output: Any) -> Tensor:
    """Returns the hidden states of a block's output: a tensor, or the first of a tuple, by version."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def load_causal_lm(folder: Path) -> list[nn.Module]:
    """Returns the layers of a model saved by transformers, on the meta device.

    Each stage later reads only its own layers' tensors from the folder's safetensors files, so the whole model is never
    in one process. Raises SettingError for a folder without such a model, and for an unknown type.
    """
    files = _files_of(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise SettingError(f"{folder} holds no causal language model: {first_line(error)}") from None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = causal_lm_layers(model)
    for layer in layers:
        own = {name: names[id(parameter)] for name, parameter in layer.named_parameters()}
        if missing := [name for name in own.values() if name not in files]:
            raise SettingError(f"{folder} has no tensor {missing[0]}, which a model of type {config.model_type} needs")
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to("meta"), persistent=False)
        layer.reset_parameters = StoredValues(layer, config, folder.resolve(), own, files)  # type: ignore[assignment]
    return layers


@dataclass
class StoredValues:
    """Initialises a layer with the values in a folder; it is the layer's ``reset_parameters``."""

    layer: nn.Module
    config: PreTrainedConfig
    folder: Path
    names: dict[str, str]
    """What the folder calls each of the layer's parameters."""
    files: dict[str, Path]

    def __call__(self) -> None:
        """Reads the layer's parameters; buffers, which are not in the files, follow from the configuration."""
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                key = self.names[name]
                with safe_open(self.files[key], "pt") as tensors:
                    parameter.copy_(tensors.get_tensor(key))
            for module in self.layer.modules():
                if any(True for _ in module.buffers(recurse=False)):
                    made = dict(type(module)(self.config).named_buffers())
                    for name, buffer in module.named_buffers(recurse=False):
                        buffer.copy_(made[name])


def _files_of(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not single.exists():
        raise SettingError(f"{folder} has no model.safetensors; save a model there with save_pretrained")
    with safe_open(single, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def save_causal_lm(folder: Path, layers: Sequence[nn.Module], read: Callable[[int], Mapping[str, Tensor]]) -> None:
    """Writes trained values of the layers of ``load_causal_lm`` to a folder, one safetensors file a layer, with a copy
    of the other files of their own folder.

    ``read`` returns a layer's values by name; only one layer's are in memory at a time. Raises SettingError for other
    layers, and for a link in their folder to a file outside of it.
    """
    origins = [getattr(layer, "reset_parameters", None) for layer in layers]
    stored = [origin for origin in origins if isinstance(origin, StoredValues)]
    if len(stored) < len(layers):
        raise SettingError(
            "only a model whose layers all come from load_causal_lm can be written back; suite.load(run) returns any "
            "model in Python"
        )
    folder.mkdir(parents=True)
    own = stored[0].folder.resolve()
    blobs = own.parent.parent / "blobs"  # the cache of Hugging Face links to it
    for other in own.iterdir():
        if other.is_file() and not other.name.startswith(("model", "pytorch_model", "optimizer")):
            if other.resolve().parent not in (own, blobs):
                raise SettingError(
                    f"{other} is a symbolic link to {other.resolve()}, outside of the model's folder, and the export "
                    "would have a copy of that file; replace the link by the file, or remove it"
                )
            shutil.copy(other, folder)
    places: dict[str, str] = {}
    total = 0
    for index, origin in enumerate(stored):
        names, file = origin.names, f"model-{index + 1:05}-of-{len(layers):05}.safetensors"
        values = {names[name]: tensor for name, tensor in read(index).items() if names[name] not in places}
        save_file(values, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(values, file)
        total += sum(tensor.nbytes for tensor in values.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1))
