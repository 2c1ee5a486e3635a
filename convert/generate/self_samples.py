"""Generated text, `self:TOKENS`: calibration or training text that the model itself writes.

Sequences sampled at temperature 1 need no data and resemble the training data of the model. They
are stored in batches, so that a longer run continues a shorter or an interrupted one, and every
rank and every resumed run reads the same. A batch is what one seed makes: `batch_size` sequences,
of which each becomes one block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gqa.checkpoint.chat_template import render_chat
from gqa.checkpoint.provenance import checkpoint_digest, versions
from gqa.checkpoint.read import Checkpoint
from gqa.convert.generate.sample_store import store_batches
from gqa.convert.generate.sampling import (
    MAX_BATCH,
    MAX_CACHE_BYTES,
    host_room,
    kv_bytes,
    sample_sequences,
    sequences_of_model,
)
from gqa.convert.heads.config import read_config
from gqa.convert.recast.targets import recast_as_is
from gqa.core.console import SILENT, Watcher
from gqa.core.devices import fast_dtype, free_memory
from gqa.core.errors import RefusedError
from gqa.corpus.blocks import MIX, START_EVERY, with_repeats
from gqa.corpus.tokens import Block, Ints, first_token
from gqa.models.loading import WEIGHTS_SHARE
from gqa.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of generated text, consecutive in a file: {"input_ids": (block_size,) int64}.

    Attributes:
        path: The file of int32 token ids.
        block_size: Tokens of a block.
        n_blocks: Number of blocks; the file may have more.
        fingerprint: What text it is: the name of the file, and whether passages are repeated.
        seed: Of the repeated passages.
        start: The token that stays at the beginning of blocks that begin with it.
        plain: Whether blocks are returned as the model wrote them; otherwise some get repeated
            passages (`with_repeats` in corpus/blocks.py).
    """

    path: Path
    block_size: int
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
        """The token ids (block_size,) of block `index`, as the model wrote them."""
        block_bytes = 4 * self.block_size
        ids = np.fromfile(self.path, np.int32, self.block_size, offset=block_bytes * int(index))
        return ids.astype(np.int64)


def sampled_blocks(
    load: Callable[..., PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    *,
    block_size: int,
    n_blocks: int,
    seed: int,
    plain: bool,
    watcher: Watcher = SILENT,
    trust_remote_code: bool = False,
    id_limit: int | None = None,
) -> SampledBlocks:
    """The first `n_blocks` blocks of text that a model writes at temperature 1.

    They are read from the cache; the model is loaded and writes only what is missing there.

    Args:
        load: `load(dtype=...)` loads the model on `device`. If the weights do not fit there, it is
            called with `device="auto"` too.
        device: Where the model writes.
        checkpoint: The model.
        block_size: Tokens of a block.
        n_blocks: Number of blocks.
        seed: Of the text. With the same seed, more blocks begin with the same ones.
        plain: Whether to return blocks as the model wrote them. Otherwise some get repeated
            passages, because generated text does not exercise retrieval from the context.
        watcher: Shows the progress.
        trust_remote_code: Whether code of the checkpoint may run.
        id_limit: Token ids are below it, if it is given: another model that reads them may have
            fewer rows.

    Raises:
        RefusedError: The model cannot be sampled from.
    """
    source = recast_as_is(checkpoint)
    config = read_config(source.config, source.name).text_config
    if id_limit is not None and id_limit >= int(config.vocab_size):
        id_limit = None  # the model has no token that would have to be excluded

    start = first_token(config, source.name, ", or pass text with --data instead of self")
    adds_start = True
    chat_token = None
    tokenizer = _tokenizer(checkpoint, trust_remote_code)
    if tokenizer is not None:
        adds_start = tokenizer("a")["input_ids"][:1] == [start]
        chat_token = first_of_chat(tokenizer, checkpoint, start)

    # Sampling is random anyway, so use the device's fast dtype, whatever the stored one is.
    dtype = fast_dtype(device)
    fitting = MAX_CACHE_BYTES // kv_bytes(source, block_size, dtype)
    batch_size = max(1, min(MAX_BATCH, fitting))

    sampler = _BlockSampler(
        load=load,
        device=device,
        checkpoint=source,
        block_size=block_size,
        batch_size=batch_size,
        dtype=dtype,
        seed=seed,
        start=start,
        adds_start=adds_start,
        chat_token=chat_token,
        id_limit=id_limit,
        watcher=watcher,
    )
    identity = sampler.identify(samples_identity(checkpoint, trust_remote_code))
    path = store_batches(
        identity,
        block_size=block_size,
        batch_size=batch_size,
        n_blocks=n_blocks,
        sample=sampler.sample,
    )
    kind = "plain" if plain else MIX
    fingerprint = f"self {path.stem} {kind}"
    return SampledBlocks(path, block_size, n_blocks, fingerprint, seed, start, plain)


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
        block_size: Tokens of a block.
        batch_size: Blocks of a batch.
        dtype: The dtype in which the model writes.
        seed: Of the whole text.
        start: The first token of every sequence that is sampled.
        adds_start: Whether the tokenizer begins texts with it.
        chat_token: The special token with which chats begin; None if there is none.
        id_limit: Token ids are below it; None for all of the model.
        watcher: Shows the progress.
    """

    load: Callable[..., PreTrainedModel]
    device: str
    checkpoint: Checkpoint
    block_size: int
    batch_size: int
    dtype: torch.dtype
    seed: int
    start: int
    adds_start: bool
    chat_token: int | None
    id_limit: int | None
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
            self.block_size,
            self.batch_size,
            self.dtype,
        ]
        identity = " ".join(map(str, fields))
        if self.id_limit is not None:
            identity += f" below {self.id_limit}"
        return identity

    def sample(self, batch_indices: Sequence[int]) -> Iterator[Tensor]:
        """Sample the batches with these consecutive indices.

        Yields blocks (N, block_size), of as many batches at a time as fit into memory.
        """
        sampled_tokens = self._sequence_length - 1  # the first is given
        total = len(batch_indices) * self.batch_size * sampled_tokens
        self.watcher.stage(f"{self.checkpoint.name} writes", total)

        model = self._load_model()
        batches_at_once = self._batches_at_once(model)
        for first in range(0, len(batch_indices), batches_at_once):
            yield self._sample_together(model, batch_indices[first : first + batches_at_once])

    @property
    def _sequence_length(self) -> int:
        """Tokens that are sampled for a block: one more if most blocks lose their first token."""
        return self.block_size if self.adds_start else self.block_size + 1

    def _load_model(self) -> PreTrainedModel:
        """The model: on the device, or spread over several if its weights would fill the device."""
        weight_bytes = self.dtype.itemsize * self.checkpoint.parameters
        free = free_memory(torch.device(self.device))

        options = {"dtype": str(self.dtype).removeprefix("torch.")}
        if free is not None and weight_bytes > free * WEIGHTS_SHARE:
            options["device"] = "auto"
        return self.load(**options)

    def _batches_at_once(self, model: PreTrainedModel) -> int:
        """Batches that fit into the memory of the devices on which the model is, at least 1."""
        devices = {parameter.device for parameter in model.parameters()}
        least = min(_room_on(device) for device in devices)
        # Each device has its share of the layers, and of their caches.
        free = len(devices) * least
        sequences = sequences_of_model(self.checkpoint, self.block_size, self.dtype, free)
        return max(1, sequences // self.batch_size)

    def _sample_together(self, model: PreTrainedModel, batch_indices: Sequence[int]) -> Tensor:
        """The blocks (N, block_size) of the batches with these consecutive indices."""
        first_block = batch_indices[0] * self.batch_size
        blocks = first_block + torch.arange(len(batch_indices) * self.batch_size)

        second_tokens = None
        if self.chat_token is not None:
            is_chat = (blocks // START_EVERY) % 2 == 1
            second_tokens = torch.where(is_chat, self.chat_token, -1)

        rows = sample_sequences(
            model,
            self._sequence_length,
            seeds=[derive_seed(self.seed, index) for index in batch_indices],
            sequences_per_seed=self.batch_size,
            progress=self.watcher.update,
            second_tokens=second_tokens,
            id_limit=self.id_limit,
        )
        if self.adds_start:
            return rows

        with_start = rows[:, :-1]
        without_start = rows[:, 1:]
        keeps_start = blocks % START_EVERY == START_EVERY - 1
        return with_start.where(keeps_start[:, None], without_start)


def _room_on(device: torch.device) -> int:
    """Bytes for sequences that are sampled at the same time on a device."""
    free = free_memory(device)
    if free is None:  # host memory, or disk
        return host_room()
    return free


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
    stored = checkpoint.stored or checkpoint
    if trusted and "auto_map" in stored.config:
        identity += " code"
    return identity


def derive_seed(seed: int, label: int | str) -> int:
    """An independent seed for `label`, the index of a batch or the name of a use.

    Batches have seeds of their own so that earlier ones need not be sampled again. Uses have them
    because weights predict the text better that they were fitted to: only calibration uses `seed`
    itself.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {label}".encode()).digest()[:7], "big")
