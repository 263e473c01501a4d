"""Fine-tuning: a Llama from a folder of transformers, trained through the pipeline and written back to a folder.

python examples/finetune_llama.py          # makes a small one from a configuration, since this needs no download
gpipe experiment examples/finetune_llama.py:llama
gpipe export RUN                           # AutoModelForCausalLM.from_pretrained("RUN/export") loads it
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.huggingface.causal_lm import load_causal_lm
from suite import TrainSpec

LENGTH = 64
MODEL = Path(__file__).with_name("llama")


def nll(logits: Tensor, ids: Tensor) -> Tensor:
    """Nats per token."""
    return nn.functional.cross_entropy(logits.transpose(1, 2), ids)


def llama() -> TrainSpec:
    """The bytes of this repository's documentation, over two stages; each reads only its own layers' weights."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = b"".join(page.read_bytes() for page in pages)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
    pairs = [(row[:-1], row[1:]) for row in rows]
    cut = len(pairs) * 9 // 10
    return TrainSpec(
        layers=load_causal_lm(MODEL),
        loss=nll,
        train=pairs[:cut],
        valid=pairs[cut:],
        batch_size=32,
        stages=2,
        steps=100,
        settings="optimizer.learning_rate=3e-3 optimizer.warmup_steps=10 optimizer.lr_decay=cosine",
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(MODEL)
