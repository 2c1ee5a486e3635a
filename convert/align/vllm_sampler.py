"""Text that a model writes by vLLM (`--sampler vllm`), which shares its weights and sequences out over all GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.loading import ranks
from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import read_config

AT_ONCE = 512  # sequences between two that are kept
_SHARE = 0.9  # of a GPU's free memory, as vLLM's own default


def check_vllm() -> None:
    """Raises RefusedError where it is not installed, or several processes would each start it."""
    if ranks().num_processes > 1:
        raise RefusedError("--sampler vllm shares a model over all GPUs by itself; start it without a launcher")
    if not find_spec("vllm"):
        raise RefusedError("--sampler vllm needs vLLM; install it with: pip install vllm")


class VllmSampler:
    """The model of a checkpoint in vLLM, which loads it by itself."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, start: int, length: int, trust_remote_code: bool
    ) -> None:
        """It writes sequences of `length` tokens that begin with `start`. Raises RefusedError where vLLM fails."""
        from vllm import LLM

        heads, gpus = read_config(checkpoint.config, checkpoint.name).main.query, max(1, torch.cuda.device_count())
        free = [free / whole for free, whole in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]
        self._name, self._start, self._length = checkpoint.name, start, length
        try:
            self._model: Any = LLM(
                model=str(checkpoint.directory), dtype=str(dtype).removeprefix("torch."), max_model_len=length,
                tensor_parallel_size=max(n for n in range(1, gpus + 1) if heads % n == 0), skip_tokenizer_init=True,
                gpu_memory_utilization=_SHARE * min(free, default=1.0), trust_remote_code=trust_remote_code,
            )  # fmt: skip
        except Exception as error:  # whatever it and its processes raise
            raise RefusedError(f"vLLM cannot load {checkpoint.name}: {explain(error)}; leave --sampler out") from None

    def write(self, seeds: Sequence[int]) -> Tensor:
        """(B, length) token ids, one sequence for each seed, at temperature 1. Nothing stops a sequence. Raises
        RefusedError where vLLM fails.
        """
        from vllm import SamplingParams

        how = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True, "detokenize": False}
        drawn = [SamplingParams(**how, max_tokens=self._length - 1, seed=seed) for seed in seeds]
        try:
            found = self._model.generate(
                [{"prompt_token_ids": [self._start]} for _ in seeds], drawn, use_tqdm=False
            )  # fmt: skip
        except Exception as error:
            raise RefusedError(f"vLLM cannot sample from {self._name}: {explain(error)}; leave --sampler out") from None
        return torch.tensor([[self._start, *each.outputs[0].token_ids] for each in found])
