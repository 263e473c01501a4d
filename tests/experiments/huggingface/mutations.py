"""Folders of small GPT-2 and Llama models, damaged and changed at random as those of a model hub and of users are."""

import json
import random
from functools import partial

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.experiments.huggingface.config_mutations import cut_config, no_field, odd_field, other_field


def gpt2(n_layer=2, **fields):
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(n_layer=n_layer, **sizes, bos_token_id=0, eos_token_id=0, **fields))


def llama(num_hidden_layers=2, **fields):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_hidden_layers, **sizes, **heads, **fields))


MODELS = {"gpt2": gpt2, "llama": llama, "llama, tied": partial(llama, tie_word_embeddings=True)}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 548105171\n"
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool]
OTHER_FILES = (
    "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "consolidated.00.pth", "pytorch_model.bin",
    "model.gguf", "adapter_model.safetensors", "adapter_config.json", "model.fp16.safetensors", "training_args.bin",
    "params.json", "model-00001-of-00009.safetensors", "original/consolidated.00.pth", ".DS_Store", "._config.json",
    ".gitattributes", ".cache/huggingface/x.lock", "weights.safetensors", "rng_state.pth",
)  # fmt: skip


def save_folders(root):
    """Writes each model in one file and in several, with a tokenizer's files; returns the folders."""
    folders = []
    for name, make in MODELS.items():
        torch.manual_seed(len(folders))
        model = make()
        for size in ("1GB", "8KB"):
            folder = root / f"{name.replace(', ', '_')}_{size}"
            model.save_pretrained(folder, max_shard_size=size)
            (folder / "tokenizer.json").write_text("{}")
            (folder / "tokenizer_config.json").write_text("{}")
            folders.append(folder)
    return folders


def mutate(folder, seed):
    """Changes a folder in one to three ways by a seed; returns their names."""
    draw = random.Random(seed)
    count = draw.choice([1, 1, 1, 1, 2, 3])
    done = []
    for _ in range(count):
        name = draw.choice(sorted(MUTATIONS))
        try:
            found = MUTATIONS[name](folder, draw)
        except (OSError, ValueError, KeyError, IndexError, AttributeError, TypeError, SafetensorError):
            found = None  # an earlier change left nothing of the kind
        done.append(f"{name} ({found})" if isinstance(found, str) else name)
    return done


def _shards(folder):
    return sorted(folder.glob("*.safetensors"))


def _index(folder):
    return folder / "model.safetensors.index.json"


def _rewritten(folder, change):
    """Passes all tensors by name through ``change``; keeps the files that they are in."""
    names = {}
    for file in _shards(folder):
        tensors = load_file(file)
        changed = {}
        for key, tensor in tensors.items():
            for new, value in change(key, tensor).items():
                changed[new] = value.clone().contiguous()
                names[new] = file.name
        save_file(changed, file, {"format": "pt"})
    if _index(folder).exists():
        content = json.loads(_index(folder).read_text())
        content["weight_map"] = names
        _index(folder).write_text(json.dumps(content))


def _keys(folder):
    return sorted(key for file in _shards(folder) for key in load_file(file))


def _body(folder):
    return "transformer." if "gpt2" in (folder / "config.json").read_text() else "model."


def _tied_names(folder):
    return (
        "transformer.wte.weight" if _body(folder) == "transformer." else "model.embed_tokens.weight"
    ), "lm_head.weight"


def hub_keys(folder, draw):
    body = _body(folder)
    _rewritten(folder, lambda key, tensor: {key.removeprefix(body): tensor})


def hub_keys_of_some(folder, draw):
    body = _body(folder)
    _rewritten(folder, lambda key, tensor: {key.removeprefix(body) if draw.random() < 0.5 else key: tensor})


def no_tensor(folder, draw):
    lost = draw.choice(_keys(folder))
    _rewritten(folder, lambda key, tensor: {} if key == lost else {key: tensor})
    return lost


def _added(folder, name, tensor_beside, chosen):
    """Adds a tensor, made of the one with the name ``chosen``."""
    _rewritten(folder, lambda key, tensor: {key: tensor} | ({name: tensor_beside(tensor)} if key == chosen else {}))


def more_tensors(folder, draw):
    extra = draw.choice(["h.0.attn.bias", "score.weight", "model.layers.9.mlp.up_proj.weight", "x", "é.weight", ""])
    _added(folder, extra, lambda _: torch.ones(2, 2), _keys(folder)[0])
    return extra


def old_buffers(folder, draw):
    body = _body(folder)
    extra = {"transformer.": "h.0.attn.masked_bias", "model.": "layers.0.self_attn.rotary_emb.inv_freq"}[body]
    _added(folder, body + extra, lambda _: torch.ones(2), _keys(folder)[0])


def tied_under_its_other_name(folder, draw):
    source, other = _tied_names(folder)
    _rewritten(folder, lambda key, tensor: {other if key.endswith(source) else key: tensor})


def tied_twice(folder, draw):
    source, other = _tied_names(folder)
    factor = draw.choice([1, 2])
    _added(folder, other, lambda tensor: tensor.float() * factor, source)
    return f"times {factor}"


def twice_by_prefix(folder, draw):
    body, chosen = _body(folder), draw.choice(_keys(folder))
    factor = draw.choice([1, 2])
    _added(folder, chosen.removeprefix(body), lambda tensor: tensor.float() * factor, chosen)
    return f"{chosen} times {factor}"


def another_shape(folder, draw):
    chosen = draw.choice(_keys(folder))
    shape = draw.choice([lambda t: t[:1], lambda t: t.flatten(), lambda t: t[None], lambda t: t.T, lambda t: t[:0]])
    _rewritten(folder, lambda key, tensor: {key: shape(tensor) if key == chosen else tensor})
    return chosen


def another_dtype(folder, draw):
    dtype, all_of_them = draw.choice(DTYPES), draw.random() < 0.5
    chosen = draw.choice(_keys(folder))
    _rewritten(folder, lambda key, tensor: {key: tensor.to(dtype) if all_of_them or key == chosen else tensor})
    return f"{dtype}, {'all' if all_of_them else chosen}"


def flipped_bytes(folder, draw):
    file = draw.choice(_shards(folder))
    data = bytearray(file.read_bytes())
    for _ in range(draw.randrange(1, 4)):
        data[draw.randrange(0, 400)] = draw.randrange(256)
    file.write_bytes(data)
    return file.name


def a_folder_in_its_place(folder, draw):
    file = draw.choice([*_shards(folder), *folder.glob("*.json")])
    file.unlink()
    file.mkdir()
    return file.name


def stale_index(folder, draw):
    """An index of files that are gone beside the one with all tensors."""
    _index(folder).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}))


def whole_file_beside_shards(folder, draw):
    tensors = {key: value.float() * 2 for file in _shards(folder) for key, value in load_file(file).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def index_of_another_kind(folder, draw):
    content = json.loads(_index(folder).read_text())
    kind = draw.randrange(11)
    names = content["weight_map"]
    chosen = draw.choice(sorted(names))
    if kind == 0:
        content = draw.choice([[], "x", 3, None, {}])
    elif kind == 1:
        content["weight_map"] = draw.choice([[], "x", 3, None, {}, [1]])
    elif kind == 2:
        names[chosen] = draw.choice([None, 3, [], "", ".", "..", {"a": 1}])
    elif kind == 3:
        names[chosen] = "../elsewhere.safetensors"
    elif kind == 4:
        names[chosen] = "nul\0.safetensors"
    elif kind == 5:
        names[chosen] = draw.choice(sorted(set(names.values())))
    elif kind == 6:
        names["not.there"] = names[chosen]
    elif kind == 7:
        del names[chosen]
    elif kind == 8:
        names["not.there"] = "not-there.safetensors"
    elif kind == 9:
        content.pop("metadata")
    else:
        (folder / "shards").mkdir()
        for file in _shards(folder):
            file.rename(folder / "shards" / file.name)
        content["weight_map"] = {key: f"shards/{name}" for key, name in names.items()}
    text = json.dumps(content)
    _index(folder).write_text(text)
    return f"kind {kind}: {chosen}"


def cut_index(folder, draw):
    data = _index(folder).read_bytes()
    _index(folder).write_bytes(draw.choice([data[:40], b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, b"{" * 5000, b""]))


MUTATIONS = {
    change.__name__: change
    for change in (
        hub_keys, hub_keys_of_some, no_tensor, more_tensors, old_buffers, tied_under_its_other_name, tied_twice,
        twice_by_prefix, another_shape, another_dtype, flipped_bytes, a_folder_in_its_place, stale_index,
        whole_file_beside_shards, index_of_another_kind, cut_index, odd_field, no_field, other_field, cut_config,
    )
}  # fmt: skip
