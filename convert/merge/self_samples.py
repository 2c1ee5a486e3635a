"""Self-generated text, `self:TOKENS`: calibration or training text that the model itself writes.

Sequences sampled at temperature 1 need no data and resemble the training data of the model. They
are stored in batches, so that a longer run continues a shorter or an interrupted one, and every
rank and every resumed run reads the same.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import sdpa_mask

from gqa.checkpoint.chat_template import render_chat
from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.write import write_bytes
from gqa.convert.heads.config import read_config
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.core.compat import attention_name
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import fast_dtype, free_memory
from gqa.core.errors import RefusedError, explain
from gqa.corpus.blocks import MIX, START_EVERY, with_repeats
from gqa.corpus.cache import cache_errors, datasets_cache
from gqa.corpus.tokens import Block, Ints, first_token
from gqa.models.attention_functions import attend_sdpa, register
from gqa.models.loading import FILLED, cache_name, load_tokenizer

SAMPLED = 64  # largest batch of sequences sampled with one seed
SAMPLED_BYTES = 1 << 30  # largest KV cache of such a batch
_ROOM = 64  # tokens
_PIECE = 64  # entries of the vocabulary
DRAWN = 24  # bytes per logit while a token is drawn
_MOST = 16384  # sequences at a time: attention kernels index them with 16 bits


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of `size` tokens that a model wrote, consecutive in the file `path`: {"input_ids":
    (size,) int64}.

    start: the token that stays at the beginning of blocks that begin with it. plain: return blocks
    as the model wrote them; otherwise some get repeated passages (`with_repeats` in
    corpus/blocks.py).
    """

    path: Path
    size: int
    n_blocks: int
    fingerprint: str
    seed: int
    start: int
    plain: bool

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError if it is out of range."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        ids = (
            self._read(index)
            if self.plain
            else with_repeats(self._read, index, self.seed, self.start)
        )
        return {"input_ids": ids}

    def _read(self, index: int) -> Ints:
        return np.fromfile(
            self.path, np.int32, self.size, offset=4 * self.size * int(index)
        ).astype(np.int64)


def sampled_blocks(
    load: Callable[..., PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    size: int,
    n_blocks: int,
    seed: int,
    plain: bool,
    watcher: Watcher = SILENT,
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> SampledBlocks:
    """The first `n_blocks` blocks of `size` tokens that the model of `checkpoint` writes at
    temperature 1. If its tokenizer begins texts with BOS, all begin with it, otherwise one of
    START_EVERY. If chats begin with a special token, so does half of the blocks (after BOS). Unless
    `plain`, some get repeated passages, since self-generated text does not exercise retrieval from
    the context.

    `load(dtype=...)` loads the model on `device`; it is called if blocks are missing in the cache,
    with `device="auto"` if the weights do not fit on `device`. Token ids are below `vocabulary`, if
    it is given: another model that reads them may have fewer rows. Raises RefusedError if the model
    cannot be sampled from.
    """
    source = as_it_is(checkpoint)
    rows_of_model = int(read_config(source.config, source.name).text.vocab_size)
    vocabulary = None if vocabulary is None or vocabulary >= rows_of_model else vocabulary
    start = first_token(read_config(source.config, source.name).text, source.name)
    lead = 0
    chat = None
    if tokenizer := _tokenizer(checkpoint, trust_remote_code):
        lead = int(tokenizer("a")["input_ids"][:1] != [start])
        chat = first_of_chat(tokenizer, checkpoint, start)

    # Sampling is random anyway, so use the device's fast dtype, whatever the stored one is.
    dtype = fast_dtype(device)
    batch = max(1, min(SAMPLED, SAMPLED_BYTES // _cache_bytes(source, size, dtype)))

    def sample(numbers: Sequence[int]) -> Iterable[Tensor]:
        watcher.stage(f"{checkpoint.name} writes", len(numbers) * batch * (size + lead - 1))
        weights = dtype.itemsize * sum(math.prod(spec.shape) for spec in source.tensors.values())
        free = free_memory(torch.device(device))
        spread = {"device": "auto"} if free is not None and weights > free * FILLED else {}
        model = load(dtype=str(dtype).removeprefix("torch."), **spread)
        devices = {parameter.device for parameter in model.parameters()}
        # free_memory is None for parts of the model in host memory or on disk.
        least = len(devices) * min(free_memory(place) or SAMPLED_BYTES for place in devices)
        several = max(1, at_once(source, size, dtype, least) // batch)
        for first in range(0, len(numbers), several):
            seeds = [derive_seed(seed, number) for number in numbers[first : first + several]]
            index = torch.arange(len(seeds) * batch) + numbers[first] * batch
            second = None if chat is None else torch.where(index // START_EVERY % 2 == 1, chat, -1)
            rows = samples(
                model,
                size + lead,
                seeds=seeds,
                batch=batch,
                progress=watcher.update,
                second=second,
                vocabulary=vocabulary,
            )
            begins = index % START_EVERY == START_EVERY - 1
            yield rows[:, lead:].where(~begins[:, None], rows[:, :size])

    known = samples_identity(checkpoint, trust_remote_code)
    identity = (
        f"{known} {start} {'' if chat is None else chat} {lead * START_EVERY} {seed} {size} "
        f"{batch} {dtype}"
    )
    identity += "" if vocabulary is None else f" below {vocabulary}"
    path = store_batches(identity, size, batch, n_blocks, sample)
    fingerprint = f"self {path.stem} {'plain' if plain else MIX}"
    return SampledBlocks(path, size, n_blocks, fingerprint, seed, start, plain)


def _tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The tokenizer; None if there is none that can be loaded."""
    try:
        return load_tokenizer(checkpoint, trust_remote_code)
    except RefusedError:
        return None


def first_of_chat(tokenizer: Any, checkpoint: Checkpoint, start: int) -> int | None:
    """The special token with which the tokenizer's chats begin, but for BOS `start`; None if there
    is none.

    Raises RefusedError for a chat template that does not end (`render_chat`).
    """
    text = render_chat(tokenizer, checkpoint, "a")
    if not text:
        return None

    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = next((token for token in tokens if token != start), None)
    return first if first in tokenizer.added_tokens_decoder else None


def samples_identity(checkpoint: Checkpoint, trusted: bool) -> str:
    """Everything that determines a model's samples: its contents, `trusted` code of its own,
    library versions.
    """
    code = trusted and "auto_map" in (checkpoint.source or checkpoint).config
    return f"{checkpoint_digest(checkpoint)} {versions('torch', 'transformers')}{' code' * code}"


def derive_seed(seed: int, label: int | str) -> int:
    """An independent seed for `label`: the number of a batch, so that earlier batches need not be
    sampled again, or a use. Calibration uses `seed` itself; others need other text, as weights
    predict what they were fitted to better.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {label}".encode()).digest()[:7], "big")


def store_batches(
    identity: str,
    size: int,
    batch: int,
    rows: int,
    sample: Callable[[Sequence[int]], Iterable[Tensor]],
) -> Path:
    """A file in the cache of `datasets`, named by the hash of `identity`, with at least `rows` rows
    (size,) of int32.

    `sample(numbers)` yields the missing batches of `batch` rows with these numbers, one or several
    at a time. Each is durable before the next is sampled, and stays if one fails: another call
    continues there.

    Raises:
        RefusedError: The text cannot be sampled. CacheError: The cache cannot be written, or is too
        small, as far as that is known before anything is sampled.
    """
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path = datasets_cache() / "gqa-samples" / f"{name}.int32"
    with cache_errors():
        path.parent.mkdir(parents=True, exist_ok=True)
        _append_batches(path, size, batch, rows, sample)
    return path


def _append_batches(
    path: Path,
    size: int,
    batch: int,
    rows: int,
    sample: Callable[[Sequence[int]], Iterable[Tensor]],
) -> None:
    """Append the batches that a file lacks; see `store_batches`."""
    batch_bytes = 4 * size * batch
    batches = -(-rows // batch)
    with FileLock(f"{path}.lock"), path.open("ab", buffering=0) as file:
        stored = file.tell() // batch_bytes
        file.truncate(batch_bytes * stored)  # drop the partial batch of an interrupted run
        missing = range(stored, batches)
        if not missing:
            return

        needed = batch_bytes * len(missing)
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            reason = (
                f"{needed:,} bytes of generated text do not fit into the {free:,} that are free"
            )
            raise OSError(errno.ENOSPC, reason, str(path))

        for ids in sample(missing):
            try:
                write_bytes(file, ids.numpy().astype(np.int32).tobytes())
                os.fsync(file.fileno())
            except OSError as error:
                stored = file.tell() // batch_bytes
                reason = (
                    f"{error.strerror} ({stored} of {batches} parts of the generated text are kept)"
                )
                raise OSError(error.errno, reason, str(path)) from error


def at_once(checkpoint: Checkpoint, length: int, dtype: torch.dtype, free: int) -> int:
    """Number of sequences of `length` tokens that fit into three quarters of `free` bytes."""
    vocabulary = int(read_config(checkpoint.config, checkpoint.name).text.vocab_size)
    return min(
        _MOST, free * 3 // 4 // (_cache_bytes(checkpoint, length, dtype) + DRAWN * vocabulary)
    )


def _cache_bytes(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    cache = checkpoint_cache(checkpoint)
    return cache.bytes_per_token // cache.bytes_per_number * dtype.itemsize * length


@torch.no_grad()
def samples(
    model: Any,
    length: int,
    *,
    seeds: Sequence[int],
    batch: int,
    progress: Callable[[int], object] = lambda tokens: None,
    encoder_inputs: Mapping[str, Tensor] | None = None,
    banned: Sequence[int] = (),
    second: Tensor | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Sample (batch, length) token ids without the `banned` ones and those from `vocabulary` on,
    reproducible for a seed, batch size and machine: one batch for each seed, concatenated. Raises
    RefusedError.

    EOS does not end a sequence: the model then starts another text, as in training.
    `encoder_inputs`: keyword arguments for an encoder-decoder. second: Second tokens of all
    sequences; -1 is sampled.
    """
    if not hasattr(model, "generate"):
        raise RefusedError(
            f"{model.name_or_path} cannot generate text: {type(model).__name__} has no head "
            "that predicts tokens; pass text with --data instead of self"
        )
    start = first_token(model.config, model.name_or_path)
    if vocabulary is not None:
        banned = [
            *banned,
            *range(vocabulary, model.config.get_text_config(decoder=True).vocab_size),
        ]
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=length - 1,
        pad_token_id=start,
        decoder_start_token_id=start,
        suppress_tokens=list(banned) or None,
    )
    model.generation_config = settings  # else generate() fills unset fields from the checkpoint's
    generators = (torch.Generator().manual_seed(one) for one in seeds)
    draw = LogitsProcessorList([Draw(*generators, second=second, progress=progress)])
    batch *= len(seeds)
    prompt = torch.full((batch, 1), start, device=model.device)
    try:
        with _fast_attention(model):
            inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            if encoder_inputs is not None:
                inputs = {**encoder_inputs, "decoder_input_ids": prompt}
            # Not an override of the class, which may add tokens or search differently.
            ids: Tensor = GenerationMixin.generate(
                model, **inputs, generation_config=settings, logits_processor=draw, **_cache(model)
            )
    except Exception as error:  # whatever a class raises that generates something else, or not so
        raise RefusedError(
            f"{model.name_or_path} cannot generate {batch} sequences of {length} tokens at a time "
            f"({explain(error)}); pass text with --data, or lower --context if memory is short"
        ) from error
    return ids.cpu()


class Draw:
    """A logits processor that samples a token per row at temperature 1 by inverting the cumulative
    distribution. It needs one random number per row; torch.multinomial needs one per vocabulary
    entry, a third of a step's time.
    """

    def __init__(
        self,
        *generators: torch.Generator,
        second: Tensor | None = None,
        progress: Callable[[int], object] = lambda tokens: None,
    ) -> None:
        """Each generator samples an equal share of the rows.

        `second`: what is not sampled first; -1 is.
        """
        self._generators = generators
        self._second = second
        self._progress = progress

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> the same shape, 0 for the token that is drawn and -inf for all
        others.
        """
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        rows_per_seed = len(scores) // len(self._generators)
        drawn = torch.cat(
            [torch.rand(rows_per_seed, 1, generator=one, dtype=precise) for one in self._generators]
        )
        weights = scores.float().softmax(-1)
        # First a piece of the vocabulary, then a token in it, so that few numbers are summed in
        # float64.
        pieces = pad(weights, (0, -weights.shape[1] % _PIECE)).unflatten(1, (-1, _PIECE))
        piece, drawn = _invert(pieces.sum(-1).to(precise), drawn.to(scores.device))
        token, _ = _invert(pieces.take_along_dim(piece[..., None], 1).squeeze(1).to(precise), drawn)
        tokens = (piece * _PIECE + token).clamp_max(scores.shape[1] - 1)
        if self._second is not None and input_ids.shape[1] == 1:
            second = self._second[:, None].to(tokens)
            # A token without an embedding
            tokens = second.where((second >= 0) & (second < scores.shape[1]), tokens)
        self._progress(len(scores))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def _invert(weights: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The entry (B, 1) of each row of (B, n) weights at which their cumulative sum exceeds the
    share `drawn` (B, 1) of the whole, and which share of its weight is below.
    """
    cdf = weights.cumsum(-1)
    reached = drawn * cdf[:, -1:]
    entry = torch.searchsorted(cdf, reached, right=True).clamp_max(weights.shape[1] - 1)
    above = (cdf.take_along_dim(entry, 1) - reached) / weights.take_along_dim(entry, 1)
    return entry, (1 - above).clamp_min(0)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache with room for up to _ROOM more tokens; DynamicLayer copies all keys and values at
    every token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, t, d) and values (B, G, t, e); return those of all tokens."""
        first = self.get_seq_length()
        states = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*states)
            self._buffers = [new[:, :, :0] for new in states]
        end = first + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            more = end + _ROOM - self._buffers[0].shape[2]
            self._buffers = [pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]
        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, first:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        for part, buffer in zip((self.keys, self.values), self._buffers, strict=True):
            part.buffer = buffer  # type: ignore[attr-defined]
        return self.keys, self.values


def _cache(model: Any) -> dict[str, Any]:
    """Cache argument for generate(); {} for encoder-decoders and layers other than DynamicLayer or
    sliding ones.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    supported = {DynamicLayer, DynamicSlidingWindowLayer}.issuperset(map(type, cache.layers))
    if model.config.is_encoder_decoder or not supported:
        return {}
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return {cache_name(model): cache}


@contextmanager
def _fast_attention(model: Any) -> Iterator[None]:
    """Within the block: on CPUs `attend_one`, four times as fast as torch's kernel for one query in
    bfloat16; on CUDA no cuDNN kernels, which are compiled for each length.
    """
    if model.device.type == "cuda":
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            yield
    elif model.device.type == "cpu" and attention_name(model) == "sdpa":
        model.set_attn_implementation("gqa_steps")
        try:
            yield
        finally:
            model.set_attn_implementation("sdpa")
    else:
        yield


def _attend_steps(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    if q.shape[2] > 1 or any(
        options.get(name) is not None for name in ("position_bias", "softcap", "cache")
    ):
        return attend_sdpa(module, q, k, v, mask, **options)
    return attend_one(q, k, v, mask, options.get("scaling"))


register("gqa_steps", _attend_steps, sdpa_mask)


def attend_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """(B, H, 1, d) queries, (B, G, T, d) keys, (B, G, T, e) values, a mask (B, 1 or H, 1, T) -> (B,
    1, H, e).
    """
    groups = key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    length = key.shape[2]
    # matmul would copy the slice, so multiply the whole buffer; its rest is zero.
    key, value = (getattr(states, "buffer", states) for states in (key, value))
    # (B, G, H / G, T)
    scores = ((query.unflatten(1, (groups, -1)).squeeze(3) * scaling) @ key.mT)[..., :length]
    if mask is not None:
        shared = mask if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1)).squeeze(3)
        scores = (
            scores.masked_fill(~shared, -torch.inf) if mask.dtype == torch.bool else scores + shared
        )
    attention = pad(
        scores.softmax(-1, dtype=torch.float32).to(value.dtype), (0, value.shape[2] - length)
    )
    output: Tensor = attention @ value
    return output.flatten(1, 2)[:, None]
