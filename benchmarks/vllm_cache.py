"""Perplexity that vLLM computes with a quantized KV cache, to compare with `gqa-eval
--simulate-cache`.

vLLM runs in an environment of its own (docs/serving.md). Keys and values go through its cache
before attention reads them, so what the cache rounds away is in the result:

    python benchmarks/vllm_cache.py MODEL --text held-out.txt --kv-cache-dtype fp8
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path


def main() -> None:
    """Print the nats per token and the perplexity of blocks of text, each read on its own."""
    arguments = _parse()
    # Without reports to vLLM's makers; threads where the system puts them.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    from vllm import LLM, SamplingParams

    model = LLM(
        model=arguments.model,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_model_len=arguments.context + 1,  # vLLM also generates a token
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    text = Path(arguments.text).read_text(encoding="utf-8")
    ids = model.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    starts = range(0, min(len(ids), arguments.tokens) - arguments.context + 1, arguments.context)
    blocks = [ids[start : start + arguments.context] for start in starts]

    # 0: the log-probability of the prompt's own token alone
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = model.generate([{"prompt_token_ids": block} for block in blocks], settings)

    nats = 0.0
    count = 0
    for block, output in zip(blocks, outputs, strict=True):
        # Nothing predicts the first token.
        for token, candidates in zip(block[1:], output.prompt_logprobs[1:], strict=True):
            nats -= candidates[token].logprob
            count += 1

    mean = nats / count
    print(
        f"{arguments.model}, KV cache {arguments.kv_cache_dtype}: {mean:.4f} nats per token, "
        f"perplexity {math.exp(mean):.3f} on {count:,} tokens"
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="directory of a checkpoint")
    parser.add_argument("--text", required=True, help="file of held-out text")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as of vllm serve")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--context", type=int, default=256, help="tokens of a block")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
