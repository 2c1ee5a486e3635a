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
from gqa.convert.recast.targets import checkpoint_cache, recast_as_is
from gqa.core.compat import attention_name
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import fast_dtype, free_memory, total_memory
from gqa.core.errors import RefusedError, explain
from gqa.corpus.blocks import MIX, START_EVERY, with_repeats
from gqa.corpus.cache import cache_errors, datasets_cache
from gqa.corpus.tokens import Block, Ints, first_token
from gqa.models.attention_functions import attend_sdpa, register
from gqa.models.loading import WEIGHTS_SHARE, cache_name, load_tokenizer

MAX_BATCH = 64  # sequences that are sampled with one seed, at most
MAX_CACHE_BYTES = 1 << 30  # KV cache of such a batch, at most
_MAX_HOST_BYTES = 8 << 30  # of batches that are sampled at the same time on a CPU, at most
BYTES_PER_LOGIT = 24  # of memory, while a token is drawn
_KERNEL_SEQUENCES = 16384  # at a time, at most: attention kernels index them with 16 bits
_CACHE_ROOM = 64  # tokens by which a KV cache grows
_CHUNK = 64  # entries of the vocabulary that are drawn from together


# ------------------------------------------------------------------------------------------ blocks


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of generated text, consecutive in a file: {"input_ids": (size,) int64}.

    Attributes:
        path: The file of int32 token ids.
        size: Tokens of a block.
        n_blocks: Number of blocks; the file may have more.
        fingerprint: What text it is: the name of the file, and whether passages are repeated.
        seed: Of the repeated passages.
        start: The token that stays at the beginning of blocks that begin with it.
        plain: Whether blocks are returned as the model wrote them; otherwise some get repeated
            passages (`with_repeats` in corpus/blocks.py).
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

        if self.plain:
            ids = self._read(index)
        else:
            ids = with_repeats(self._read, index, self.seed, self.start)
        return {"input_ids": ids}

    def _read(self, index: int) -> Ints:
        """The token ids (size,) of block `index`, as the model wrote them."""
        block_bytes = 4 * self.size
        ids = np.fromfile(self.path, np.int32, self.size, offset=block_bytes * int(index))
        return ids.astype(np.int64)


def sampled_blocks(
    load: Callable[..., PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    *,
    size: int,
    n_blocks: int,
    seed: int,
    plain: bool,
    watcher: Watcher = SILENT,
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> SampledBlocks:
    """The first `n_blocks` blocks of text that a model writes at temperature 1.

    They are read from the cache; the model is loaded and writes only what is missing there.

    Args:
        load: `load(dtype=...)` loads the model on `device`. If the weights do not fit there, it is
            called with `device="auto"` too.
        device: Where the model writes.
        checkpoint: The model.
        size: Tokens of a block.
        n_blocks: Number of blocks.
        seed: Of the text. With the same seed, more blocks begin with the same ones.
        plain: Whether to return blocks as the model wrote them. Otherwise some get repeated
            passages, because self-generated text does not exercise retrieval from the context.
        watcher: Of the progress.
        trust_remote_code: Whether code of the checkpoint may run.
        vocabulary: Token ids are below it, if it is given: another model that reads them may have
            fewer rows.

    Raises:
        RefusedError: The model cannot be sampled from.
    """
    source = recast_as_is(checkpoint)
    config = read_config(source.config, source.name).text
    if vocabulary is not None and vocabulary >= int(config.vocab_size):
        vocabulary = None  # the model has no token that would have to be excluded

    start = first_token(config, source.name, ", or pass text with --data instead of self")
    adds_start = True
    chat_token = None
    tokenizer = _tokenizer(checkpoint, trust_remote_code)
    if tokenizer is not None:
        adds_start = tokenizer("a")["input_ids"][:1] == [start]
        chat_token = first_of_chat(tokenizer, checkpoint, start)

    # Sampling is random anyway, so use the device's fast dtype, whatever the stored one is.
    dtype = fast_dtype(device)
    batch = max(1, min(MAX_BATCH, MAX_CACHE_BYTES // _cache_bytes(source, size, dtype)))

    sampler = _BlockSampler(
        load=load,
        device=device,
        checkpoint=source,
        size=size,
        batch=batch,
        dtype=dtype,
        seed=seed,
        start=start,
        adds_start=adds_start,
        chat_token=chat_token,
        vocabulary=vocabulary,
        watcher=watcher,
    )
    identity = sampler.identify(samples_identity(checkpoint, trust_remote_code))
    path = store_batches(identity, size, batch, n_blocks, sampler.sample)
    kind = "plain" if plain else MIX
    fingerprint = f"self {path.stem} {kind}"
    return SampledBlocks(path, size, n_blocks, fingerprint, seed, start, plain)


@dataclass(frozen=True)
class _BlockSampler:
    """Loads a model and samples batches of blocks from it.

    Blocks begin as the texts do on which the model was trained. If its tokenizer begins texts with
    `start` (BOS), all blocks begin with it, otherwise one of START_EVERY. If chats begin with a
    special token, so does half of the blocks, after BOS if they have it. What a block begins with
    depends on its number alone, so that later runs can add blocks.

    Attributes:
        load: Loads the model; see `sampled_blocks`.
        device: Where it writes.
        checkpoint: The model, in a class that can be read (`recast_as_is`).
        size: Tokens of a block.
        batch: Blocks of a batch, which one seed makes.
        dtype: The dtype in which the model writes.
        seed: Of the whole text.
        start: The first token of every sequence that is sampled.
        adds_start: Whether the tokenizer begins texts with it.
        chat_token: The special token with which chats begin; None if there is none.
        vocabulary: Token ids are below it; None for all of the model.
        watcher: Of the progress.
    """

    load: Callable[..., PreTrainedModel]
    device: str
    checkpoint: Checkpoint
    size: int
    batch: int
    dtype: torch.dtype
    seed: int
    start: int
    adds_start: bool
    chat_token: int | None
    vocabulary: int | None
    watcher: Watcher

    def identify(self, model: str) -> str:
        """Everything that determines the text: `model`, which `samples_identity` returns, and the
        attributes that blocks depend on.

        It names cached files: where one character of it changes, all text is generated again.
        """
        chat_token = "" if self.chat_token is None else self.chat_token
        start_every = 0 if self.adds_start else START_EVERY
        fields = [
            model,
            self.start,
            chat_token,
            start_every,
            self.seed,
            self.size,
            self.batch,
            self.dtype,
        ]
        identity = " ".join(map(str, fields))
        if self.vocabulary is not None:
            identity += f" below {self.vocabulary}"
        return identity

    def sample(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        """Sample the batches with these consecutive numbers.

        Yields blocks (N, size), of as many batches at a time as fit into memory.
        """
        total = len(numbers) * self.batch * (self._sequence_length - 1)  # the first is not sampled
        self.watcher.stage(f"{self.checkpoint.name} writes", total)

        model = self._load_model()
        batches_at_once = self._batches_at_once(model)
        for first in range(0, len(numbers), batches_at_once):
            yield self._sample_together(model, numbers[first : first + batches_at_once])

    @property
    def _sequence_length(self) -> int:
        """Tokens that are sampled for a block: one more if most blocks lose their first token."""
        return self.size if self.adds_start else self.size + 1

    def _load_model(self) -> PreTrainedModel:
        """The model: on the device, or spread over several if its weights would fill the device."""
        numbers = sum(spec.numel for spec in self.checkpoint.tensors.values())
        weight_bytes = self.dtype.itemsize * numbers
        free = free_memory(torch.device(self.device))

        options = {"dtype": str(self.dtype).removeprefix("torch.")}
        if free is not None and weight_bytes > free * WEIGHTS_SHARE:
            options["device"] = "auto"
        return self.load(**options)

    def _batches_at_once(self, model: PreTrainedModel) -> int:
        """Batches that fit into the memory of the devices on which the model is, at least 1."""
        devices = {parameter.device for parameter in model.parameters()}
        # free_memory is None for parts of the model in host memory or on disk.
        least = min(free_memory(device) or host_room() for device in devices)
        # Each device has its share of the layers, and of their caches.
        free = len(devices) * least
        return max(1, max_sequences(self.checkpoint, self.size, self.dtype, free) // self.batch)

    def _sample_together(self, model: PreTrainedModel, numbers: Sequence[int]) -> Tensor:
        """The blocks (N, size) of the batches with these consecutive numbers."""
        first_block = numbers[0] * self.batch
        blocks = first_block + torch.arange(len(numbers) * self.batch)

        second_tokens = None
        if self.chat_token is not None:
            is_chat = (blocks // START_EVERY) % 2 == 1
            second_tokens = torch.where(is_chat, self.chat_token, -1)

        rows = samples(
            model,
            self._sequence_length,
            seeds=[derive_seed(self.seed, number) for number in numbers],
            batch=self.batch,
            progress=self.watcher.update,
            second_tokens=second_tokens,
            vocabulary=self.vocabulary,
        )
        if self.adds_start:
            return rows

        with_start = rows[:, :-1]
        without_start = rows[:, 1:]
        keeps_start = blocks % START_EVERY == START_EVERY - 1
        return with_start.where(keeps_start[:, None], without_start)


def _tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The tokenizer; None if there is none that can be loaded."""
    try:
        return load_tokenizer(checkpoint, trust_remote_code)
    except RefusedError:
        return None


def first_of_chat(tokenizer: Any, checkpoint: Checkpoint, start: int) -> int | None:
    """The special token with which the tokenizer's chats begin, after BOS (`start`) if they have
    it; None if they begin with no special token.

    Raises RefusedError for a chat template that does not end (`render_chat`).
    """
    text = render_chat(tokenizer, checkpoint, "a")
    if not text:
        return None

    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = next((token for token in tokens if token != start), None)
    return first if first in tokenizer.added_tokens_decoder else None


def samples_identity(checkpoint: Checkpoint, trusted: bool) -> str:
    """Everything about a model that determines its samples: its contents, whether it runs code of
    its own, which is `trusted`, and the versions of libraries.
    """
    identity = f"{checkpoint_digest(checkpoint)} {versions('torch', 'transformers')}"
    stored = checkpoint.source or checkpoint
    if trusted and "auto_map" in stored.config:
        identity += " code"
    return identity


def derive_seed(seed: int, label: int | str) -> int:
    """An independent seed for `label`, the number of a batch or the name of a use.

    Batches have seeds of their own so that earlier ones need not be sampled again. Uses have them
    because weights predict the text better that they were fitted to: only calibration uses `seed`
    itself.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {label}".encode()).digest()[:7], "big")


# ------------------------------------------------------------------------------------------- cache


def store_batches(
    identity: str,
    size: int,
    batch: int,
    rows: int,
    sample: Callable[[Sequence[int]], Iterable[Tensor]],
) -> Path:
    """A file in the cache of `datasets` with at least `rows` rows (size,) of int32 token ids.

    Each batch is durable before the next is sampled, and stays if one fails: another call continues
    there.

    Args:
        identity: What determines the rows. The file is named by its hash.
        size: Tokens of a row.
        batch: Rows of a batch.
        rows: Rows that the file has at least.
        sample: `sample(numbers)` yields the missing batches with these numbers, one or several at a
            time.

    Raises:
        RefusedError: The text cannot be sampled.
        CacheError: The cache cannot be written, or is too small, as far as that is known before
            anything is sampled.
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
    batches = math.ceil(rows / batch)
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


def host_room() -> int:
    """Bytes of host memory for the sequences that are sampled at the same time on a CPU.

    Each step reads all weights, so more sequences at a time are generated faster. But what an
    interruption loses grows, too.
    """
    total = total_memory("cpu")
    if total is None:
        return MAX_CACHE_BYTES
    return max(MAX_CACHE_BYTES, min(_MAX_HOST_BYTES, total // 4))


def max_sequences(checkpoint: Checkpoint, length: int, dtype: torch.dtype, free: int) -> int:
    """Number of sequences of `length` tokens whose caches and logits fit into three quarters of
    `free` bytes.
    """
    vocabulary = int(read_config(checkpoint.config, checkpoint.name).text.vocab_size)
    logits_bytes = BYTES_PER_LOGIT * vocabulary
    sequence_bytes = _cache_bytes(checkpoint, length, dtype) + logits_bytes
    return sequences_in(free, sequence_bytes)


def sequences_in(free: int, sequence_bytes: int) -> int:
    """Number of sequences of so many bytes that are sampled at the same time in `free` bytes."""
    return min(_KERNEL_SEQUENCES, free * 3 // 4 // sequence_bytes)


def _cache_bytes(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of a sequence of `length` tokens in this dtype."""
    cache = checkpoint_cache(checkpoint)
    numbers_per_token = cache.bytes_per_token // cache.bytes_per_number
    return numbers_per_token * dtype.itemsize * length


# ---------------------------------------------------------------------------------------- sampling


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
    second_tokens: Tensor | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Sample sequences at temperature 1, reproducible for a seed, batch size and machine.

    EOS does not end a sequence: the model then starts another text, as in training.

    Args:
        model: A model of transformers with a head that predicts tokens.
        length: Tokens of a sequence, with the first, which is not sampled.
        seeds: One for each batch.
        batch: Sequences of a batch.
        progress: Called with the number of tokens after each step.
        encoder_inputs: Keyword arguments of the encoder of an encoder-decoder.
        banned: Token ids that are not sampled.
        second_tokens: (N,) the second token of each sequence; -1 if it is sampled.
        vocabulary: Token ids from it on are not sampled.

    Returns:
        Token ids (N, length) of N = batch * len(seeds) sequences, one batch after the other.

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
    if vocabulary is not None:
        rows = model.config.get_text_config(decoder=True).vocab_size
        suppressed += range(vocabulary, rows)
    settings = GenerationConfig(
        do_sample=False,  # `Draw` leaves one token, which greedy search then takes
        max_new_tokens=length - 1,
        pad_token_id=start,
        decoder_start_token_id=start,
        suppress_tokens=suppressed or None,
    )
    model.generation_config = settings  # else generate() fills unset fields from the checkpoint's

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    draw = Draw(*generators, second_tokens=second_tokens, progress=progress)
    count = batch * len(seeds)
    prompt = torch.full((count, 1), start, device=model.device)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    if encoder_inputs is not None:
        inputs = {**encoder_inputs, "decoder_input_ids": prompt}

    try:
        with _fast_attention(model):
            # Not an override of the class, which may add tokens or search differently.
            ids: Tensor = GenerationMixin.generate(
                model,
                **inputs,
                **_cache(model),
                generation_config=settings,
                logits_processor=LogitsProcessorList([draw]),
            )
    except Exception as error:  # whatever a class raises that does not generate text this way
        raise RefusedError(
            f"{model.name_or_path} cannot generate {count} sequences of {length} tokens at a time "
            f"({explain(error)}); pass text with --data, or lower --context if memory is short"
        ) from error
    return ids.cpu()


class Draw:
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
        chunk, shares = _invert(chunks.sum(-1).to(precise), shares)
        in_chunk = chunks.take_along_dim(chunk[..., None], 1).squeeze(1)
        token, _ = _invert(in_chunk.to(precise), shares)
        return (chunk * _CHUNK + token).clamp_max(scores.shape[1] - 1)


def _invert(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
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


# -------------------------------------------------------------------------- KV cache and attention


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache of a layer with room for up to _CACHE_ROOM more tokens.

    DynamicLayer copies all keys and values at every token.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, t, d) and values (B, G, t, e); return those of all tokens.

        The attribute `buffer` of what is returned has the room too, filled with zeros.
        """
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        states = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*states)
            self._buffers = [new[:, :, :0] for new in states]

        room = self._buffers[0].shape[2]
        if end > room:
            more = end + _CACHE_ROOM - room
            self._buffers = [pad(buffer, (0, 0, 0, more)) for buffer in self._buffers]

        for buffer, new in zip(self._buffers, states, strict=True):
            buffer[:, :, begin:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        for part, buffer in zip((self.keys, self.values), self._buffers, strict=True):
            part.buffer = buffer  # type: ignore[attr-defined]
        return self.keys, self.values


def _cache(model: Any) -> dict[str, Any]:
    """The argument of generate() for a cache of `GrowingLayer`s, by its name.

    Empty for encoder-decoders, and for models whose caches have layers other than DynamicLayer and
    sliding ones: generate() then makes the cache.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    kinds = {type(layer) for layer in cache.layers}
    is_supported = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
    if model.config.is_encoder_decoder or not is_supported:
        return {}

    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer()
    return {cache_name(model): cache}


@contextmanager
def _fast_attention(model: Any) -> Iterator[None]:
    """Let a model attend faster within the block.

    On CPUs with `attend_one`, which is four times as fast as torch's kernel for one query in
    bfloat16; on CUDA without cuDNN kernels, which are compiled for each length.
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
    """Attention for transformers: `attend_one` for a step of one token, `attend_sdpa` for others,
    and for variants of attention.
    """
    is_step = q.shape[2] == 1
    variants = ("position_bias", "softcap", "cache")
    is_variant = any(options.get(name) is not None for name in variants)
    if is_step and not is_variant:
        return attend_one(q, k, v, mask, options.get("scaling"))
    return attend_sdpa(module, q, k, v, mask, **options)


register("gqa_steps", _attend_steps, sdpa_mask)


def attend_one(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of one query per sequence.

    Args:
        query: (B, H, 1, d).
        key: (B, G, T, d).
        value: (B, G, T, e).
        mask: (B, 1 or H, 1, T), bool or to be added to the scores.
        scaling: Of the scores; by default 1 / sqrt(d).

    Returns:
        (B, 1, H, e).
    """
    groups = key.shape[1]
    length = key.shape[2]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5

    # matmul would copy the slice of a `GrowingLayer`, so multiply the whole buffer; its rest is
    # zero.
    key = getattr(key, "buffer", key)
    value = getattr(value, "buffer", value)

    per_group = query.unflatten(1, (groups, -1)).squeeze(3)  # (B, G, H / G, d)
    scores = ((per_group * scaling) @ key.mT)[..., :length]  # (B, G, H / G, T)
    if mask is not None:
        scores = _masked(scores, mask)

    attention = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    padding = value.shape[2] - length
    output: Tensor = pad(attention, (0, padding)) @ value
    return output.flatten(1, 2)[:, None]


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores (B, G, H / G, T) with a mask (B, 1 or H, 1, T), bool or to be added."""
    if mask.shape[1] > 1:
        groups = scores.shape[1]
        mask = mask.unflatten(1, (groups, -1)).squeeze(3)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask
