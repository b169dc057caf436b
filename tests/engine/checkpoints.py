"""Tiny models with random weights, written as a real checkpoint folder: small enough that a test makes its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
PLAIN = ("llama", "qwen2", "mistral")  # two norms a layer, none of them for heads
NORMS = {
    False: ("input", "post_attention"),
    True: ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a byte, then <|start|> and <|end|> at 256 and 257, then fillers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", *(f"<|filler{n}|>" for n in range(vocab_size - 258))]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_checkpoint(folder: Path, seed: int = 0, scale: float = 0.08, **changes: Any) -> Path:
    """A folder that this engine and transformers both load. `changes` go into config.json."""
    config = TINY | changes
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    gemma = config["model_type"].startswith("gemma")
    # Gemma stores how far its norms are from 1
    centre, spread = (0.0 if gemma else 1.0), (1.0 if config["model_type"] in PLAIN else 4.0)
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    widths = {"q": config["num_attention_heads"] * head_dim, "k": config["num_key_value_heads"] * head_dim}
    widths["v"] = widths["k"]
    tensors = {
        "model.embed_tokens.weight": weights(config["vocab_size"], hidden) * 4,
        "model.norm.weight": centre + weights(hidden),
    }
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        for part, width in widths.items():
            tensors[f"{prefix}.self_attn.{part}_proj.weight"] = weights(width, hidden) * 2
            if config["model_type"] == "qwen2":
                tensors[f"{prefix}.self_attn.{part}_proj.bias"] = weights(width) * 8
        tensors[f"{prefix}.self_attn.o_proj.weight"] = weights(hidden, widths["q"]) * 2
        tensors[f"{prefix}.mlp.gate_proj.weight"] = weights(inner, hidden)
        tensors[f"{prefix}.mlp.up_proj.weight"] = weights(inner, hidden)
        tensors[f"{prefix}.mlp.down_proj.weight"] = weights(hidden, inner)
        for norm in NORMS[gemma]:
            tensors[f"{prefix}.{norm}_layernorm.weight"] = centre + weights(hidden) * spread
        if config["model_type"] in ("qwen3", "gemma3_text"):
            tensors[f"{prefix}.self_attn.q_norm.weight"] = centre + weights(head_dim) * spread
            tensors[f"{prefix}.self_attn.k_norm.weight"] = centre + weights(head_dim) * spread
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = weights(config["vocab_size"], hidden) * 4
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    architecture = ARCHITECTURES[config["model_type"]]
    named = config | {"architectures": [architecture], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(named))
    byte_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return folder
