"""Causal language models of transformers: cut into layers, read from a folder layer by layer, and written back."""

import json
import os
import random
import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.huggingface import causal_lm
from experiments.huggingface.causal_lm import causal_lm_layers, load_causal_lm, save_causal_lm
from suite.errors import SettingError, SuiteError
from suite.pipeline.model.layers import structure_key
from tests.experiments.huggingface import mutations
from tests.experiments.huggingface.config_mutations import change_config
from tests.experiments.huggingface.outcomes import IDS, export, logits, on_cpu, theirs

MODELS = {name: mutations.MODELS[name] for name in ("gpt2", "llama")}


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """A model of transformers with random values, and the folder that it is in, in several files."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    return model, tmp_path / "model"


def test_the_layers_compute_what_the_model_computes_and_each_reads_its_own_values(saved):
    model, folder = saved
    assert logits(causal_lm_layers(model)).equal(model(IDS).logits)
    layers = load_causal_lm(folder)
    assert all(tensor.is_meta for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
    assert logits(on_cpu(layers)).equal(model(IDS).logits)


@pytest.mark.parametrize("shard_bytes", [causal_lm.SHARD_BYTES, 1])
def test_written_back_the_folder_loads_in_transformers(saved, tmp_path, shard_bytes, monkeypatch):
    """With changed values, so that it is not the first folder that is read."""
    monkeypatch.setattr(causal_lm, "SHARD_BYTES", shard_bytes)
    _, folder = saved
    layers = load_causal_lm(folder)
    trained = on_cpu(layers)
    with torch.no_grad():
        trained[2].get_parameter(next(name for name, _ in trained[2].named_parameters())).mul_(1.5)
    values = [{name: parameter.detach() for name, parameter in layer.named_parameters()} for layer in trained]
    save_causal_lm(tmp_path / "out", layers, values.__getitem__)
    files = [file.name for file in (tmp_path / "out").glob("*.safetensors*")]
    assert len(files) == len(layers) + 1 if shard_bytes == 1 else files == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (model(IDS).logits - logits(trained)).abs().max() <= 1e-5
    generated = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert generated[:, : IDS.shape[1]].equal(IDS)
    tokens = IDS
    for _ in range(6):
        tokens = torch.cat([tokens, logits(trained, tokens)[:, -1:].argmax(-1)], 1)
    assert generated.tolist() == tokens.tolist()


def test_a_model_of_another_type_or_that_needs_a_mask_is_refused():
    model = MODELS["llama"]()
    model.set_attn_implementation("eager")
    with pytest.raises(SettingError, match="the model's attention is eager, which needs a mask"):
        causal_lm_layers(model)
    model.config.model_type = "mamba"
    with pytest.raises(SettingError, match="of type mamba cannot be cut into layers; known: gpt2, llama"):
        causal_lm_layers(model)


def test_a_folder_in_bf16_is_trained_and_written_in_fp32(tmp_path):
    MODELS["llama"]().bfloat16().save_pretrained(tmp_path / "half")
    trained = on_cpu(layers := load_causal_lm(tmp_path / "half"))
    assert {parameter.dtype for layer in trained for parameter in layer.parameters()} == {torch.float32}
    export(layers, tmp_path / "out", lambda value: value + 1e-4)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = (value + 1e-4 for layer in trained for value in layer.parameters())
    assert all(value.equal(one) for value, one in zip(loaded.parameters(), expected, strict=True))


def test_other_layers_cannot_be_written_back(tmp_path):
    with pytest.raises(SettingError, match="layers all come from load_causal_lm"):
        save_causal_lm(tmp_path / "out", [torch.nn.Linear(2, 2)], lambda layer: {})


def test_blocks_that_differ_only_in_their_index_are_measured_once(saved):
    model, folder = saved
    layers = load_causal_lm(folder)
    keys = [structure_key(layer) for layer in layers]
    assert len(layers) == 4
    assert keys[1] == keys[2]
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
    export(layers, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()
    (own / "vocab.json").symlink_to(tmp_path / "key")
    with pytest.raises(SettingError, match=r"vocab.json is a symbolic link to .*key, outside of the model's folder"):
        export(layers, tmp_path / "more")


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    """A model in one file, to be changed."""
    torch.manual_seed(0)
    mutations.MODELS[request.param]().save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_the_output_projection_of_a_model_that_is_not_tied_is_no_embedding(folder):
    mutations.tied_under_its_other_name(folder, None)
    with pytest.raises(SettingError, match=r"has no tensor model\.embed_tokens\.weight, which a model of type llama"):
        load_causal_lm(folder)


@pytest.mark.parametrize("folder", ["llama, tied"], indirect=True)
@pytest.mark.parametrize("factor", [1, 2])
def test_a_tied_matrix_that_is_stored_twice_stays_one_where_both_are_equal(folder, factor):
    mutations.tied_twice(folder, SimpleNamespace(choice=lambda _: factor))
    first, *_, last = load_causal_lm(folder)
    shared = {*map(id, first.parameters())} & {*map(id, last.parameters())}
    assert len(shared) == (factor == 1)


def test_a_relative_path_given_as_text_is_read_from_any_folder(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder.parent)
    layers = load_causal_lm("own")
    monkeypatch.chdir("/")
    torch.testing.assert_close(logits(on_cpu(layers)), theirs(folder))


def test_only_what_belongs_to_the_trained_model_is_copied(folder, tmp_path):
    for name in (*mutations.OTHER_FILES, "tokenizer.json", "LICENSE.txt", "README.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    left = export(load_causal_lm(folder), tmp_path / "out")
    assert set(left) == {name.split("/")[0] for name in mutations.OTHER_FILES} | {"README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("model")} == {
        "config.json", "generation_config.json", "tokenizer.json", "LICENSE.txt",
    }  # fmt: skip


def test_tensors_without_a_place_are_named(folder):
    mutations.old_buffers(folder, random.Random(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_causal_lm(folder)  # what follows from the configuration is no loss
    mutations.more_tensors(folder, random.Random(1))
    with pytest.warns(UserWarning, match=r"model.safetensors has 1 tensors that a model .* they are left out: "):
        load_causal_lm(folder)


def test_an_exported_configuration_asks_for_no_attention_kernel(folder, tmp_path):
    change_config(folder, attn_implementation="flash_attention_2")
    export(layers := load_causal_lm(folder), tmp_path / "out")
    torch.testing.assert_close(theirs(tmp_path / "out"), logits(on_cpu(layers)))


DAMAGES = {
    "no files": (
        lambda folder: [file.unlink() for file in folder.iterdir()],
        r"own has no model\.safetensors; save a model there with save_pretrained",
    ),
    "an LFS pointer": (
        lambda folder: (folder / "model.safetensors").write_text(mutations.POINTER),
        r"own/model.safetensors is a Git LFS pointer.* run git lfs pull",
    ),
    "an empty configuration": (lambda folder: (folder / "config.json").write_text(""), "own/config.json is empty"),
    "a truncated file": (
        lambda folder: os.truncate(folder / "model.safetensors", 3000),
        r"own/model.safetensors cannot be read as safetensors \(.*not fully covered\)",
    ),
    "a missing shard": (
        lambda folder: [mutations.stale_index(folder, None), (folder / "model.safetensors").unlink()],
        r"own/model-00001-of-00002.safetensors cannot be read \(No such file or directory\)",
    ),
    "a link to nowhere": (
        lambda folder: [(folder / "model.safetensors").unlink(), (folder / "model.safetensors").symlink_to("gone")],
        r"own/model.safetensors cannot be read \(No such file",
    ),
    "pickled weights": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        r"has no model.safetensors; save a model .* \(weights like those in .*own/pytorch_model.bin are not read\)",
    ),
    "no folder": (lambda folder: folder.rename(folder.with_name("moved")), "own is no folder; nothing is downloaded"),
}
FIELDS = [
    ({"vocab_size": 60}, r"/model.safetensors has .* of shape \(50, 16\), and config.json asks for \(60, 16\)"),
    ({"n_layer": 10**9}, r"/config.json describes no model .*: it has 1000000000 blocks, and the folder \d+ tensors"),
    ({"n_layer": "2"}, "/config.json describes no model .*expected int, got str"),
    ({"model_type": "mamba"}, "/config.json has the model type 'mamba', which cannot be cut .*; known: gpt2, llama"),
    ({"quantization_config": {"quant_method": "gptq"}}, "/config.json has a quantization_config"),
    ({"transformers_weights": "other.safetensors"}, "/config.json has transformers_weights 'other.safetensors'"),
]
DAMAGES |= {str(fields): (partial(change_config, **fields), f"own{sentence}") for fields, sentence in FIELDS}


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_cannot_be_loaded_names_the_file(folder, damage):
    damaged, sentence = DAMAGES[damage]
    damaged(folder)
    with pytest.raises(SuiteError, match=sentence) as found:
        load_causal_lm(folder)
    assert "\n" not in str(found.value)


def test_a_file_that_is_damaged_later_is_named(folder):
    layers = load_causal_lm(folder)
    os.truncate(folder / "model.safetensors", 3000)
    with pytest.raises(SettingError, match=r"own/model\.safetensors cannot be read as safetensors"):
        on_cpu(layers)
