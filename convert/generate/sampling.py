"""Sample sequences from a model at temperature 1, as many at a time as fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from gqa.checkpoint.read import Checkpoint
from gqa.convert.generate.decoding_attention import fast_attention, growing_cache
from gqa.convert.heads.config import read_config
from gqa.convert.recast.targets import checkpoint_cache
from gqa.core.devices import total_memory
from gqa.core.errors import RefusedError, explain
from gqa.corpus.tokens import first_token

MAX_BATCH = 64  # sequences that are sampled with one seed, at most
MAX_CACHE_BYTES = 1 << 30  # KV cache of the sequences of one seed, at most
_MAX_HOST_BYTES = 8 << 30  # of batches that are sampled at the same time on a CPU, at most
BYTES_PER_LOGIT = 24  # of memory, while a token is drawn
# At a time, at most. In one direction attention kernels on CUDA launch a block of threads for each
# sequence, and a launch of more than 65,535 fails; this stays well below.
_KERNEL_SEQUENCES = 16_384
_CHUNK = 64  # entries of the vocabulary that are drawn from together


# ------------------------------------------------------------------------------------------ memory


def host_room() -> int:
    """Bytes of host memory for the sequences that are sampled at the same time on a CPU.

    Each step reads all weights, so more sequences at a time are generated faster. But what an
    interruption loses grows, too.
    """
    total = total_memory("cpu")
    if total is None:
        return MAX_CACHE_BYTES
    return max(MAX_CACHE_BYTES, min(_MAX_HOST_BYTES, total // 4))


def sequences_of_model(checkpoint: Checkpoint, length: int, dtype: torch.dtype, free: int) -> int:
    """Number of sequences of `length` tokens whose caches and logits fit into `free` bytes
    (`sequences_of_size`).
    """
    vocabulary = int(read_config(checkpoint.config, checkpoint.name).text_config.vocab_size)
    logits_bytes = BYTES_PER_LOGIT * vocabulary
    sequence_bytes = kv_bytes(checkpoint, length, dtype) + logits_bytes
    return sequences_of_size(free, sequence_bytes)


def sequences_of_size(free: int, sequence_bytes: int) -> int:
    """Number of sequences of so many bytes that are sampled at the same time in three quarters of
    `free` bytes.
    """
    return min(_KERNEL_SEQUENCES, free * 3 // 4 // sequence_bytes)


def kv_bytes(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of a sequence of `length` tokens in this dtype.

    Windows and cross-attention are left out. (The batch size of generated text follows from this
    number, and is in the names of cached texts: with another count all would be generated again.)
    """
    cache = checkpoint_cache(checkpoint)
    numbers_per_token = cache.bytes_per_token // cache.bytes_per_number
    return numbers_per_token * dtype.itemsize * length


# ---------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def sample_sequences(
    model: Any,
    length: int,
    *,
    seeds: Sequence[int],
    sequences_per_seed: int,
    progress: Callable[[int], object] = lambda tokens: None,
    encoder_inputs: Mapping[str, Tensor] | None = None,
    banned: Sequence[int] = (),
    second_tokens: Tensor | None = None,
    id_limit: int | None = None,
) -> Tensor:
    """Sample sequences at temperature 1.

    They are reproducible for a seed, a number of sequences per seed and a machine. EOS does not end
    a sequence: the model then starts another text, as in training.

    Args:
        model: A model of transformers with a head that predicts tokens.
        length: Tokens of a sequence, with the first, which is not sampled.
        seeds: Of the random numbers.
        sequences_per_seed: Sequences that each seed makes.
        progress: Called with the number of tokens after each step.
        encoder_inputs: Keyword arguments of the encoder of an encoder-decoder.
        banned: Token ids that are not sampled.
        second_tokens: (N,) the second token of each sequence; -1 if it is sampled.
        id_limit: Token ids from it on are not sampled.

    Returns:
        Token ids (N, length) of N = sequences_per_seed * len(seeds) sequences, those of one seed
        after the other.

    Raises:
        RefusedError: The model cannot generate text, or there is no memory for it.
    """
    if not hasattr(model, "generate"):
        raise RefusedError(
            f"{model.name_or_path} cannot generate text: {type(model).__name__} has no head "
            "that predicts tokens; pass text with --data instead of self"
        )

    start = first_token(model.config, model.name_or_path)
    suppressed = list(banned)
    if id_limit is not None:
        rows = model.config.get_text_config(decoder=True).vocab_size
        suppressed += range(id_limit, rows)
    settings = GenerationConfig(
        do_sample=False,  # `TokenSampler` leaves one token, which greedy search then takes
        max_new_tokens=length - 1,
        pad_token_id=start,
        decoder_start_token_id=start,
        suppress_tokens=suppressed or None,
    )
    model.generation_config = settings  # else generate() fills unset fields from the checkpoint's

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sampler = TokenSampler(*generators, second_tokens=second_tokens, progress=progress)
    count = sequences_per_seed * len(seeds)
    prompt = torch.full((count, 1), start, device=model.device)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    if encoder_inputs is not None:
        inputs = {**encoder_inputs, "decoder_input_ids": prompt}

    try:
        with fast_attention(model):
            # Not an override of the class, which may add tokens or search differently.
            ids: Tensor = GenerationMixin.generate(
                model,
                **inputs,
                **growing_cache(model),
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
            )
    except Exception as error:  # whatever a class raises that does not generate text this way
        raise RefusedError(
            f"{model.name_or_path} cannot generate {count} sequences of {length} tokens at a time "
            f"({explain(error)}); pass text with --data, or lower --context if memory is short"
        ) from error
    return ids.cpu()


class TokenSampler:
    """A logits processor that samples a token per row at temperature 1 by inverting the cumulative
    distribution.

    It needs one random number per row; torch.multinomial needs one per vocabulary entry, a third of
    a step's time.
    """

    def __init__(
        self,
        *generators: torch.Generator,
        second_tokens: Tensor | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> None:
        """
        Args:
            generators: Each makes the random numbers of an equal share of the rows.
            second_tokens: (B,) the second token of each row; -1 if it is sampled.
            progress: Called with the number of rows at each step.
        """
        self._generators = generators
        self._second_tokens = second_tokens
        self._progress = progress

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample the next token of each row.

        Args:
            input_ids: (B, T) the tokens so far.
            scores: (B, V) logits.

        Returns:
            (B, V): 0 for the token that is drawn and -inf for all others.
        """
        tokens = self._draw(scores)
        if self._second_tokens is not None and input_ids.shape[1] == 1:
            second = self._second_tokens[:, None].to(tokens)
            # A token at or above V has no embedding.
            is_decided = (second >= 0) & (second < scores.shape[1])
            tokens = second.where(is_decided, tokens)

        self._progress(len(scores))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def _draw(self, scores: Tensor) -> Tensor:
        """A token (B, 1) for each row of logits (B, V)."""
        # MPS has no float64.
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        rows_per_seed = len(scores) // len(self._generators)
        numbers = [
            torch.rand(rows_per_seed, 1, generator=generator, dtype=precise)
            for generator in self._generators
        ]
        shares = torch.cat(numbers).to(scores.device)

        # First a chunk of the vocabulary, then a token in it, so that few numbers are summed in
        # float64.
        weights = scores.float().softmax(-1)
        padding = -weights.shape[1] % _CHUNK
        chunks = pad(weights, (0, padding)).unflatten(1, (-1, _CHUNK))  # (B, V / _CHUNK, _CHUNK)
        chunk, shares = _invert_cdf(chunks.sum(-1).to(precise), shares)
        in_chunk = chunks.take_along_dim(chunk[..., None], 1).squeeze(1)
        token, _ = _invert_cdf(in_chunk.to(precise), shares)
        return (chunk * _CHUNK + token).clamp_max(scores.shape[1] - 1)


def _invert_cdf(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of each row.

    Args:
        weights: (B, n).
        shares: (B, 1) numbers in [0, 1), random and uniform.

    Returns:
        The first entry i (B, 1) whose cumulative weight c_i = w_0 + ... + w_i exceeds
        r = share * c_{n-1}; and (r - c_{i-1}) / w_i (B, 1), which is uniform in [0, 1) again.
    """
    cumulative = weights.cumsum(-1)
    reached = shares * cumulative[:, -1:]
    entry = torch.searchsorted(cumulative, reached, right=True).clamp_max(weights.shape[1] - 1)
    rest = cumulative.take_along_dim(entry, 1) - reached
    share_above = rest / weights.take_along_dim(entry, 1)
    return entry, (1 - share_above).clamp_min(0)
