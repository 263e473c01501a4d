"""Changes of a model's ``config.json``, as those of a model hub and of users."""

import json

ODD_VALUES = [None, "x", "3", -1, 0, 1, 3.5, True, [], {}, [1], {"a": 1}, "", 1e999, 20_000]


def change_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


def odd_field(folder, draw):
    name = draw.choice(sorted(json.loads((folder / "config.json").read_text())))
    value = draw.choice(ODD_VALUES)
    change_config(folder, **{name: value})
    return f"{name} = {value!r}"


def no_field(folder, draw):
    content = json.loads((folder / "config.json").read_text())
    name = draw.choice(sorted(content))
    del content[name]
    (folder / "config.json").write_text(json.dumps(content))
    return name


def other_field(folder, draw):
    fields = draw.choice([
        {"model_type": "mamba"}, {"model_type": "bert"}, {"model_type": "gpt_neo"}, {"model_type": "nope"},
        {"model_type": "clip"}, {"model_type": "t5"}, {"model_type": "mistral"}, {"model_type": "GPT2"},
        {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "float99"}, {"torch_dtype": "torch.float16"},
        {"torch_dtype": "auto"}, {"dtype": {"": "float16"}},
        {"attn_implementation": "eager"}, {"_attn_implementation": "eager"},
        {"attn_implementation": "flash_attention_2"},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization_config": {"load_in_4bit": True}},
        {"quantization_config": None}, {"quantization_config": {"quant_method": "fp8"}},
        {"auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}},
        {"transformers_weights": "model.safetensors"}, {"transformers_weights": "other.safetensors"},
        {"architectures": ["GPT2Model"]}, {"architectures": ["LlamaModel"]}, {"do_sample": True, "max_length": 9},
        {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling": {"rope_type": "nope"}},
        {"rope_scaling": "x"}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_theta": 500000.0}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True},
        {"add_cross_attention": True}, {"scale_attn_by_inverse_layer_idx": True}, {"output_attentions": True},
        {"output_hidden_states": True}, {"use_cache": False}, {"is_decoder": True}, {"return_dict": False},
        {"activation_function": "nope", "hidden_act": "nope"}, {"activation_function": "relu", "hidden_act": "relu"},
        {"vocab_size": 53}, {"n_layer": 3, "num_hidden_layers": 3}, {"n_layer": 1, "num_hidden_layers": 1},
        {"n_layer": 20_000, "num_hidden_layers": 20_000}, {"n_head": 3, "num_attention_heads": 3},
        {"head_dim": 3}, {"gradient_checkpointing": True}, {"pad_token_id": 99}, {"pruned_heads": {"0": [1]}},
        {"transformers_version": "9.9.9"}, {"_name_or_path": "gpt2"}, {"é\ud800": 1},
    ])  # fmt: skip
    change_config(folder, **fields)
    return str(fields).encode("ascii", "replace").decode()


def cut_config(folder, draw):
    data = (folder / "config.json").read_bytes()
    changed = draw.choice(
        [data[:40], b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, b"[]", b"3", b"null", b'"gpt2"', b"{}", b"\0" * 99]
    )
    (folder / "config.json").write_bytes(changed)
    return repr(changed[:9])
