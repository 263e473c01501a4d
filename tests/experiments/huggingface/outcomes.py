"""What ``load_causal_lm`` makes of a folder, beside what transformers makes of it."""

import json
import re

import torch
from transformers import AutoModelForCausalLM

from experiments.custom.layers import on_meta
from experiments.huggingface.causal_lm import load_causal_lm, save_causal_lm
from suite.errors import SuiteError
from suite.pipeline.model.layers import materialize

IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))


def on_cpu(layers):
    """Copies of the layers with their values."""
    return [materialize(on_meta(layer), 0, torch.device("cpu")).eval() for layer in layers]


def logits(layers, tensor=IDS):
    """What layers with values make of token ids."""
    for layer in layers:
        tensor = layer(tensor)
    return tensor


def export(layers, out, change=lambda value: value):
    """Writes the layers' own values, changed, to a folder; returns the files that are not copied."""
    values = [{name: change(value.detach()) for name, value in layer.named_parameters()} for layer in on_cpu(layers)]
    return save_causal_lm(out, layers, values.__getitem__)


@torch.no_grad()
def theirs(folder, **options):
    """The logits of transformers' model; None where it cannot be loaded or lacks values."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, trust_remote_code=False, **options
        )
        return None if info["missing_keys"] or info["mismatched_keys"] else model.eval()(IDS, return_dict=True).logits
    except Exception:
        return None


@torch.no_grad()
def outcome(folder, out):
    """Returns (kind, sentence or detail) of a folder; an allowed one begins with "works" or "refused"."""
    try:
        layers = load_causal_lm(folder)
        ours = logits(on_cpu(layers))
    except SuiteError as error:
        said = str(error)
        if "\n" in said or (f"{folder}/" not in said and "has no model.safetensors" not in said):
            return "FAULT: no sentence that names the file", said
        if "it has 20000 blocks" in said:
            return "refused", said  # transformers takes minutes
        return "refused" if theirs(folder, dtype=torch.float32) is None else "refused, transformers loads it", said
    except BaseException as error:
        return f"FAULT: {type(error).__name__}", str(error)
    expected = theirs(folder, dtype=torch.float32)
    if expected is not None and not torch.allclose(ours, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
        return "FAULT: other logits", ""
    try:
        export(layers, out)
    except Exception as error:
        return f"FAULT: export: {type(error).__name__}", str(error)
    back = theirs(out)
    if back is None and expected is None:
        return "works, transformers does not", "nor its export"
    if back is None or back.dtype != ours.dtype or not torch.allclose(back, ours, rtol=1e-5, atol=1e-6, equal_nan=True):
        return "FAULT: the export is another model", ""
    config = json.loads((out / "config.json").read_text())
    if config.get("dtype", config.get("torch_dtype")) != "float32":
        return "FAULT: the export's dtype", str(config.get("dtype"))
    known = r"((generation_|tokenizer_)?config|tokenizer|model\.safetensors\.index)\.json|model(-\d+)?\.safetensors"
    if strange := [path.name for path in out.iterdir() if not re.fullmatch(known, path.name)]:
        return "FAULT: the export has files of others", str(strange)
    return ("works" if expected is not None else "works, transformers does not"), ""
