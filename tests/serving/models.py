"""Checkpoints for the engines: the embedded model, and small random multi-head ones of other
families.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import load, write_safetensors
from transformers import AutoConfig, AutoModelForCausalLM

EMBEDDED = Path(__file__).parents[2] / "examples" / "stdlib-mha"
TOKENIZER = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
HEADS, HIDDEN, LAYERS, CONTEXT = 8, 256, 2, 512
WORDS = 260  # ids below are special tokens and single bytes
# config.json as published checkpoints write it: rope_theta at the top level. It is not the default
# of any class.
COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 4 * HIDDEN,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 4096,
}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
ROPE_OF_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
THETA_10000 = {"rope_theta": 10000.0}
FALCON = {
    "num_kv_heads": HEADS,
    "new_decoder_architecture": True,
    "multi_query": False,
    "parallel_attn": True,
    "num_ln_in_parallel_attn": 2,
    "alibi": False,
    "bias": False,
    "layer_norm_epsilon": 1e-5,
    "ffn_hidden_size": 1024,
}
GPT = {"n_embd": HIDDEN, "n_head": HEADS, "n_layer": LAYERS, "n_positions": CONTEXT}
BIGCODE = GPT | {"multi_query": False}

# Name -> class, model type, and what config.json says beside COMMON.
RANDOM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, head_dim 64": ("LlamaForCausalLM", "llama", {"head_dim": 64}),
    "Llama, scaled rotary": ("LlamaForCausalLM", "llama", {"rope_scaling": ROPE_OF_LLAMA_3}),
    "Llama, BPE": ("LlamaForCausalLM", "llama", {}),
    "Mistral": ("MistralForCausalLM", "mistral", {"head_dim": 32, "sliding_window": None}),
    # Its tokenizer class adds tokens, as ever padded
    "Qwen2": ("Qwen2ForCausalLM", "qwen2", {"vocab_size": 4160}),
    "Qwen2, head_dim 64": ("Qwen2ForCausalLM", "qwen2", {"vocab_size": 4160, "head_dim": 64}),
    "Qwen3": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 32}),
    "Gemma": ("GemmaForCausalLM", "gemma", GEMMA | THETA_10000),
    "Gemma, theta 1e5": ("GemmaForCausalLM", "gemma", GEMMA),
    "Phi": (
        "PhiForCausalLM",
        "phi",
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"} | THETA_10000,
    ),
    "Phi-3": (
        "Phi3ForCausalLM",
        "phi3",
        {"pad_token_id": 0, "original_max_position_embeddings": CONTEXT},
    ),
    "StableLM": ("StableLmForCausalLM", "stablelm", {"partial_rotary_factor": 0.25} | THETA_10000),
    "StableLM, theta 1e5": ("StableLmForCausalLM", "stablelm", {"partial_rotary_factor": 0.25}),
    "OLMo 2": ("Olmo2ForCausalLM", "olmo2", {}),
    "Granite": ("GraniteForCausalLM", "granite", {"attention_multiplier": 0.17}),
    "Cohere": ("CohereForCausalLM", "cohere", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "Falcon": ("FalconForCausalLM", "falcon", FALCON | THETA_10000),
    "Falcon, theta 1e5": ("FalconForCausalLM", "falcon", FALCON),
    "GPTBigCode": ("GPTBigCodeForCausalLM", "gpt_bigcode", BIGCODE),
    "Pythia": ("GPTNeoXForCausalLM", "gpt_neox", {"hidden_act": "gelu"}),
    "GPT-2": ("GPT2LMHeadModel", "gpt2", GPT),
}


def write_random(name: str, directory: Path) -> Path:
    """The multi-head model of RANDOM in float32, no weight neutral by accident, with the embedded
    model's tokenizer.
    """
    architecture, model_type, own = RANDOM[name]
    raw = {"architectures": [architecture], "model_type": model_type} | COMMON | own
    config = AutoConfig.for_model(
        **{key: value for key, value in raw.items() if key != "architectures"}
    )
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, value in (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict().items()
    ):
        noise = torch.randn(value.shape, generator=generator)
        # Norms and biases around what they start as; matrices so that activations stay near 1.
        tensors[key] = value + 0.2 * noise if value.ndim < 2 else noise * value.shape[-1] ** -0.5
        if len(value) == raw["vocab_size"]:
            # None of these is ever the most probable: llama.cpp's server answers no token that is
            # half a character.
            tensors[key][:WORDS] *= 0.1
    if raw["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    directory.mkdir(parents=True)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    for file in TOKENIZER:
        shutil.copy(EMBEDDED / file, directory / file)
    if name.endswith("BPE"):
        tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer["model"]["byte_fallback"] = False
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        (directory / "tokenizer.model").unlink()
    return directory


def swap_heads(source: Path, out: Path) -> Path:
    """What a client computes that misreads the groups: the same checkpoint with its KV heads in
    reverse order.

    Where layers have different numbers, those of the first and the last, which have as many, change
    places.
    """
    shutil.copytree(source, out)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    last, tensors = config["num_hidden_layers"] - 1, load(source)
    swapped = dict(tensors)
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            if "per_layer_config" not in config:
                swapped[name] = (
                    tensor.unflatten(0, (config["num_key_value_heads"], -1)).flip(0).flatten(0, 1)
                )
            elif ".layers.0." in name:
                other = name.replace(".0.", f".{last}.")
                swapped[name], swapped[other] = tensors[other], tensor
    write_safetensors(out / "model.safetensors", swapped)
    return out
