"""Which files of a checkpoint are its weights, which travel along with it, and which describe it to other programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gqa.checkpoint.errors import CorruptError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = frozenset((
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot", ".gguf", ".ggml", ".onnx", ".onnx_data",
    ".tflite", ".mlmodel", ".litertlm", ".task", ".pte", ".engine", ".nemo", ".npz", ".distcp",
))  # fmt: skip
# A vocabulary, or what names a class that needs none; the special tokens alone (special_tokens_map.json) are neither.
TOKENIZER_FILES = ("tokenizer*", "tokenization_*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json")
# The same model for other programs (Meta's and Mistral's own, OpenVINO, ONNX, Core ML, MLC, Ollama, llama.cpp,
# LitGPT, NeMo, vLLM), an adapter that was trained on it, and states of its training.
_OLD_MODEL = (
    "params.json", "original/*", "openvino*", "onnx/*", "genai_config.json", "coreml/*", "mlc-chat-config.json",
    "*-cache.json", "Modelfile", "*imatrix*", "adapter_config.json", "checkpoint-*/*", "trainer_state.json",
    "*.onnx[._]data*", "*.mlpackage/*", "lit_config.json", "model_config.yaml", "kv_cache_scales.json",
)  # fmt: skip


def holds_weights(name: str) -> bool:
    """Whether a file holds weights in some form. (`spk_dict.pt` are the voices of Qwen2.5-Omni, not weights.)"""
    path = Path(name)
    weights = path.suffix.lower() in WEIGHT_SUFFIXES and path.name != "spk_dict.pt"
    return weights or path.name.endswith(".index.json")


def weight_files(
    config: Mapping[str, Any], names: Collection[str], read: Callable[[str], dict[str, Any]]
) -> tuple[list[str], str | None]:
    """The files that hold the weights, and the name of their index or None, as transformers chooses: a single file
    before an index, safetensors before `.bin`. Nothing where there are none.
    """
    if (chosen := config.get("transformers_weights")) is not None:
        raise CorruptError(
            f"config.json names another file of weights, {chosen!r} (transformers_weights); rename it to {SINGLE}, its "
            f"index to {INDEX}, and remove the entry"
        )
    for single, index, suffix in ((SINGLE, INDEX, ".safetensors"), (TORCH_SINGLE, TORCH_INDEX, ".bin")):
        if single in names:
            return [single], None
        if index in names:
            return _shards(read(index), index, suffix), index
    return [], None


def _shards(index: Mapping[str, Any], name: str, suffix: str) -> list[str]:
    """The shards an index names, sorted; every name must be that of a plain file of the directory."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptError(f"{name} has no weight_map (tensor -> file); download it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(rf"[\w][\w.\- ]*{re.escape(suffix)}", file):
            raise CorruptError(
                f"{name} says that {tensor} is in {file!r}; allowed are names of {suffix} files in the same "
                "directory; download the checkpoint again"
            )
    return sorted(set(weight_map.values()))


def side_files(names: Collection[str], modules: bytes = b"[]") -> tuple[list[str], list[str]]:
    """Of the names that are neither config nor weights, those that travel along, and those that are left out: the old
    model in other forms, or a description of it. `modules` is the content of modules.json (Sentence Transformers),
    which names directories of further modules with weights of their own.
    """
    visible = sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))
    directories: tuple[str, ...] = ()
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # a file of that name with something else
        paths = [module["path"] for module in json.loads(modules)]
        directories = tuple(f"{path.rstrip('/')}/" for path in paths if path)
    weights = {name for name in visible if holds_weights(name) and not name.startswith(directories)}
    other_models = tuple({name.rpartition("/")[0] + "/" for name in weights if "/" in name})
    left_out = [
        name
        for name in visible
        if name in weights or name.startswith(other_models) or any(fnmatchcase(name, old) for old in _OLD_MODEL)
    ]
    return [name for name in visible if name not in left_out], left_out
