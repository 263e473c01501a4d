"""A causal language model of transformers as a list of layers: GPT-2 and Llama configurations.

    ids -> embeddings -> block 0 -> block 1 -> ... -> block N-1 -> norm and output projection -> logits

Each layer holds modules of transformers' own model, so it computes what that model computes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from experiments.huggingface.model_folder import (
    FOLLOWING_TENSORS,
    StoredTensor,
    copy_files,
    one_line,
    read_content,
    tensors_in,
    weights_file,
)
from suite.errors import SettingError
from suite.pipeline.model.layers import meta_device

SUPPORTED = ("gpt2", "llama")
SHARD_BYTES = 2 << 30


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
    blocks = [Block(block, structure, type(body.rotary_emb)(model.config)) for block in body.layers]
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
    """A block. It computes its rotary positions itself, if it has such: cheaper than sending them between stages."""

    def __init__(self, block: nn.Module, structure: str, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary, self.gpipe_structure = block, rotary, structure

    def forward(self, hidden: Tensor) -> Tensor:
        if self.rotary is None:
            hidden = self.block(hidden)
        else:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            embeddings = self.rotary(hidden, position_ids=positions)
            hidden = self.block(hidden, position_embeddings=embeddings, position_ids=positions)
        return hidden


class Head(nn.Module):
    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm, self.projection = norm, projection

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, T, width) -> logits (batch, T, vocabulary)."""
        logits: Tensor = self.projection(self.norm(hidden))
        return logits


def load_causal_lm(folder: Path | str) -> list[nn.Module]:
    """Returns the layers of a model saved by transformers, on the meta device.

    Each stage later reads only its own layers' tensors from the folder's safetensors files, so the whole model is never
    in one process. The names of tensors may be those of the hub, without the body's prefix, and a tied matrix may have
    either name. Warns of tensors that the model has no place for. Raises SettingError or RunFileError, with the file,
    for a folder without such a model, a damaged one, and an unknown type.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise SettingError(f"{folder} is no folder; nothing is downloaded: give one that save_pretrained wrote")
    weights = weights_file(folder)
    tensors = tensors_in(weights)
    config, model = _bare_model(folder / "config.json", weights, len(tensors))
    values = _values(tensors, model, weights)
    if _parted(values, model):
        config.tie_word_embeddings = False
        model = _build(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = causal_lm_layers(model)
    for layer in layers:
        own = {name: names[id(parameter)] for name, parameter in layer.named_parameters()}
        if missing := [name for name in own.values() if name not in values]:
            raise SettingError(f"{weights} has no tensor {missing[0]}, which a model of type {config.model_type} needs")
        for module in layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to("meta"), persistent=False)
        stored = {name: values[own[name]] for name in own}
        layer.reset_parameters = StoredValues(layer, config, folder, own, stored)  # type: ignore[assignment]
    return layers


@dataclass
class StoredValues:
    """Initialises a layer with the values in a folder; it is the layer's ``reset_parameters``."""

    layer: nn.Module
    config: PreTrainedConfig
    folder: Path
    names: dict[str, str]
    """What transformers' model calls each of the layer's parameters."""
    tensors: dict[str, StoredTensor]
    """Where each of them is."""

    def __call__(self) -> None:
        """Reads the layer's parameters; buffers, which are not in the files, follow from the configuration."""
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.copy_(self.tensors[name].read())
            for module in self.layer.modules():
                if any(True for _ in module.buffers(recurse=False)):
                    made = dict(type(module)(self.config).named_buffers())
                    for name, buffer in module.named_buffers(recurse=False):
                        buffer.copy_(made[name])


def _bare_model(file: Path, weights: Path, tensors: int) -> tuple[PreTrainedConfig, Any]:
    """Returns a folder's configuration and its model without values. ``tensors`` is the number of those stored: a
    configuration of more blocks is a damaged one, and would take hours to build."""
    content = read_content(file)
    if (kind := content.get("model_type")) not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise SettingError(f"{file} has the model type {kind!r}, which cannot be cut into layers; known: {known}")
    if (named := content.get("transformers_weights")) not in (None, weights.name):
        raise SettingError(
            f"{file} has transformers_weights {named!r}; rename that file to model.safetensors, and remove the entry"
        )
    if content.get("quantization_config") is not None:
        raise SettingError(
            f"{file} has a quantization_config, and quantized weights cannot be trained; dequantize them"
        )
    try:
        config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False)
        if not 1 <= config.num_hidden_layers <= tensors:
            raise ValueError(f"it has {config.num_hidden_layers} blocks, and the folder {tensors} tensors")
        model = _build(config)
    except Exception as error:
        raise SettingError(f"{file} describes no model of type {kind}: {one_line(error)}") from None
    config.architectures = [type(model).__name__]
    return config, model


def _build(config: PreTrainedConfig) -> Any:
    with meta_device():
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )


def _values(tensors: Sequence[StoredTensor], model: Any, weights: Path) -> dict[str, StoredTensor]:
    """Returns the tensor of each name of a model's parameters, if it is stored under one that transformers takes.

    Warns of tensors that are left out. Raises SettingError for one of another shape.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values: dict[str, StoredTensor] = {}
    unknown = []
    prefix = f"{model.base_model_prefix}."
    for tensor in sorted(tensors, key=lambda tensor: tensor.key):  # of two for one parameter the first counts
        names = (tensor.key, prefix + tensor.key, tensor.key.removeprefix(prefix))
        name = next((name for name in names if name in parameters), None)
        if name is None or name in values:
            unknown += [tensor.key] * (not tensor.key.endswith(FOLLOWING_TENSORS))
            continue
        if tensor.shape != (shape := tuple(parameters[name].shape)):
            raise SettingError(
                f"{tensor.file} has {tensor.key} of shape {tensor.shape}, and config.json asks for {shape}"
            )
        values[name] = tensor
    for other, name in model.all_tied_weights_keys.items():
        if name not in values and other in values:
            values[name] = values[other]
    if unknown:
        warnings.warn(
            f"{weights} has {len(unknown)} tensors that a model of type {model.config.model_type} has no place for; "
            f"they are left out: {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}",
            stacklevel=3,
        )
    return values


def _parted(values: Mapping[str, StoredTensor], model: Any) -> bool:
    """Returns whether a matrix that the configuration ties is stored twice, with different values."""
    pairs = model.all_tied_weights_keys.items()
    stored = [(values[other], values[name]) for other, name in pairs if other in values and name in values]
    return any(not one.read().float().equal(two.read().float()) for one, two in stored if one != two)


def save_causal_lm(folder: Path, layers: Sequence[nn.Module], read: Callable[[int], Mapping[str, Tensor]]) -> list[str]:
    """Writes trained values of the layers of ``load_causal_lm`` to a folder, in files of about ``SHARD_BYTES``, with
    the configuration, the tokenizer and the licence of their own folder; returns the other files' names there.

    ``read`` returns a layer's values by name; only one file's are in memory at a time. Raises SettingError for other
    layers, and for a link in their folder to a file outside of it.
    """
    origins = [getattr(layer, "reset_parameters", None) for layer in layers]
    stored = [origin for origin in origins if isinstance(origin, StoredValues)]
    if len(stored) < len(layers):
        raise SettingError(
            "only a model whose layers all come from load_causal_lm can be written back; for any other, in Python: "
            "torch.save(suite.load(run).state_dict(), file)"
        )
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total, dtypes = 0, set()
    for index, origin in enumerate(stored):
        names, last = origin.names, len(layers) - 1
        shard |= {names[name]: tensor for name, tensor in read(index).items() if names[name] not in places}
        if index < last and sum(tensor.nbytes for tensor in shard.values()) < SHARD_BYTES:
            continue
        is_whole = index == last and not places
        file = "model.safetensors" if is_whole else f"model-{index + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
        dtypes |= {tensor.dtype for tensor in shard.values()}
        shard = {}
    if not is_whole:
        index_file = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1))
    _write_config(folder, stored[0], reduce(torch.promote_types, dtypes))
    read_files = {tensor.file.name for origin in stored for tensor in origin.tensors.values()}
    return [name for name in copy_files(stored[0].folder, folder) if name not in read_files]


def _write_config(folder: Path, origin: StoredValues, dtype: torch.dtype) -> None:
    """Writes the configuration that the folder had, with the dtype of the new weights."""
    content = read_content(origin.folder / "config.json")
    # the first is the dtype's older name; the others name what the new folder does not have or need
    for name in ("torch_dtype", "auto_map", "transformers_weights", "attn_implementation", "_attn_implementation"):
        content.pop(name, None)
    content |= {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": origin.config.architectures,
        "tie_word_embeddings": origin.config.tie_word_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
