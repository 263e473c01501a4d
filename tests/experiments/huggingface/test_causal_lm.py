"""Causal language models of transformers: cut into layers, read from a folder layer by layer, and written back."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from experiments.custom.layers import on_meta
from experiments.huggingface.causal_lm import causal_lm_layers, load_causal_lm, save_causal_lm
from suite.errors import SettingError
from suite.pipeline.model.layers import materialize, structure_key

IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0)
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=50, max_position_embeddings=32,
        )
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """A model of transformers with random values, and the folder that it is in, in several files."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return model, tmp_path / "model"


def on_cpu(layers):
    return [materialize(on_meta(layer), 0, torch.device("cpu")).eval() for layer in layers]


def logits(layers):
    tensor = IDS
    for layer in layers:
        tensor = layer(tensor)
    return tensor


def test_the_layers_compute_what_the_model_computes(saved):
    model, _ = saved
    assert logits(causal_lm_layers(model)).equal(model(IDS).logits)


def test_each_layer_reads_its_own_values(saved):
    model, folder = saved
    layers = load_causal_lm(folder)
    assert all(tensor.is_meta for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    assert logits(on_cpu(layers)).equal(model(IDS).logits)


def test_written_back_the_folder_loads_in_transformers(saved, tmp_path):
    """With changed values, so that it is not the first folder that is read."""
    _, folder = saved
    layers = load_causal_lm(folder)
    trained = on_cpu(layers)
    with torch.no_grad():
        trained[2].get_parameter(next(name for name, _ in trained[2].named_parameters())).mul_(1.5)
    values = [{name: parameter.detach() for name, parameter in layer.named_parameters()} for layer in trained]
    save_causal_lm(tmp_path / "out", layers, values.__getitem__)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (model(IDS).logits - logits(trained)).abs().max() <= 1e-5
    generated = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert generated[:, : IDS.shape[1]].equal(IDS)
    tokens = IDS
    for _ in range(6):
        tensor = tokens
        for layer in trained:
            tensor = layer(tensor)
        tokens = torch.cat([tokens, tensor[:, -1:].argmax(-1)], 1)
    assert generated.tolist() == tokens.tolist()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"has no model\.safetensors; save a model there with save_pretrained"):
        load_causal_lm(tmp_path)


def test_a_model_of_another_type_is_refused():
    class Other:
        class config:  # noqa: N801
            model_type = "mamba"
            _attn_implementation = "sdpa"

    with pytest.raises(SettingError, match="of type mamba cannot be cut into layers; known: gpt2, llama"):
        causal_lm_layers(Other())


def test_a_model_that_needs_a_mask_is_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation("eager")
    with pytest.raises(SettingError, match="the model's attention is eager, which needs a mask"):
        causal_lm_layers(model)


def test_a_folder_in_bf16_is_trained_in_fp32(tmp_path):
    MODELS["llama"]().bfloat16().save_pretrained(tmp_path / "half")
    layers = on_cpu(load_causal_lm(tmp_path / "half"))
    assert {parameter.dtype for layer in layers for parameter in layer.parameters()} == {torch.float32}


def test_other_layers_cannot_be_written_back(tmp_path):
    with pytest.raises(SettingError, match="layers all come from load_causal_lm"):
        save_causal_lm(tmp_path / "out", [torch.nn.Linear(2, 2)], lambda layer: {})


def test_blocks_that_differ_only_in_their_index_are_measured_once(saved):
    model, folder = saved
    layers = load_causal_lm(folder)
    keys = [structure_key(layer) for layer in layers]
    assert len(layers) == 5
    assert keys[1] == keys[2] == keys[3]
    model.config.hidden_act = model.config.activation_function = "relu"
    assert structure_key(causal_lm_layers(model)[1]) != keys[1], "another activation, another function"


def test_a_link_out_of_the_models_folder_is_not_copied(saved, tmp_path):
    own = tmp_path / "models--a" / "snapshots" / "1"
    shutil.copytree(saved[1], own)
    blobs = tmp_path / "models--a" / "blobs"
    blobs.mkdir()
    (own / "config.json").rename(blobs / "abc")
    (own / "config.json").symlink_to("../../blobs/abc")  # as in the cache of Hugging Face
    (tmp_path / "key").write_text("secret")
    layers = load_causal_lm(own)
    values = [dict(layer.named_parameters()) for layer in on_cpu(layers)]
    save_causal_lm(tmp_path / "out", layers, values.__getitem__)
    assert (tmp_path / "out" / "config.json").is_file()
    (own / "notes").symlink_to(tmp_path / "key")
    with pytest.raises(SettingError, match=r"notes is a symbolic link to .*key, outside of the model's folder"):
        save_causal_lm(tmp_path / "more", layers, values.__getitem__)
