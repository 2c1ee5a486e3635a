"""Text that a model writes, `self:TOKENS`: what it is calibrated on, or what its conversion learns from.

Sequences sampled at temperature 1 need no data and look like what the model was trained on. They are kept, named by the
model, the seed and the length of a block, so a longer run goes on where a shorter one ended, an interrupted one
continues, and every rank and every resumed run reads the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqa.checkpoint.devices import free_memory, native_bfloat16, out_of_memory
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.loading import FILLED, cache_name, ranks
from gqa.checkpoint.processes import main_first, of_all, wait_for_everyone
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.align.attention import registered
from gqa.convert.align.watcher import SILENT, Watcher
from gqa.convert.heads.config import read_config
from gqa.convert.maps_file import digest_of
from gqa.convert.recast.targets import as_it_is, checkpoint_cache
from gqa.corpus.repeats import MIX, mixed
from gqa.corpus.tokens import Block, first_token

SAMPLED = 64  # sequences sampled together at most
SAMPLED_BYTES = 1 << 30  # that their caches may fill
DRAWN = 24  # bytes for each score of a token, while one is drawn
_MORE = 128  # tokens by which a cache grows
_MOST = 512  # sequences at a time, of as many batches as a GPU has memory for


@dataclass(frozen=True)
class SampledBlocks:
    """Blocks of `size` tokens that a model wrote, out of a file of int32: {"input_ids": (size,) int64}.

    lead: tokens at the beginning of each block that belong there (BOS); plain: they are as the model wrote them, else a
    part of them repeats itself (`gqa.corpus.repeats`).
    """

    file: Path
    size: int
    n_blocks: int
    fingerprint: str
    seed: int
    lead: int
    plain: bool

    def __len__(self) -> int:
        return self.n_blocks

    def __getitem__(self, index: int) -> Block:
        """Block `index`. Raises IndexError outside."""
        if not 0 <= index < self.n_blocks:
            raise IndexError(f"block {index} of {self.n_blocks}")
        found = self._raw(index) if self.plain else mixed(self._raw, index, self.seed, self.lead)
        return {"input_ids": found.astype(np.int64)}

    def _raw(self, index: int) -> NDArray[np.int32]:
        return np.fromfile(self.file, np.int32, self.size, offset=4 * self.size * int(index))


def sampled_blocks(
    load: Callable[..., PreTrainedModel],
    device: str,
    checkpoint: Checkpoint,
    size: int,
    n_blocks: int,
    seed: int,
    plain: bool,
    watcher: Watcher = SILENT,
    write: bool = True,
    together: bool = False,
    trust_remote_code: bool = False,
) -> SampledBlocks:
    """The first `n_blocks` of `size` tokens that the model of `checkpoint` writes at temperature 1. They begin with the
    token that a sample starts from if its tokenizer begins texts with it: text is read as the model is used. Unless
    `plain`, a part of them repeats itself, since nothing that a model writes exercises what finds things again.

    `load(dtype=...)` gives the model on `device`; it is called if some of them are not there yet, with `device="auto"`
    where its weights do not fit there (`too_large`). Then the main process writes all, over all devices. Raises
    RefusedError where it cannot be sampled from. Unless it is to `write`, they are none that could be read. All
    processes call it `together`, or one of them calls it.
    """
    known = as_it_is(checkpoint)
    start = first_token(read_config(known.config, known.name).text, known.name)
    lead = 0 if _begins(checkpoint, start, trust_remote_code) else 1
    if not write:
        return SampledBlocks(Path(), size, n_blocks, "", seed, 1 - lead, plain)
    # Samples are noise of temperature 1 anyway: what the device multiplies fast, however the model is stored.
    dtype = torch.bfloat16 if native_bfloat16(device) else torch.float32
    batch = _batch(known, size, dtype)

    large = too_large(known, dtype, device)
    alone = together and any(of_all(large))
    together, how = together and not alone, {"device": "auto"} if large or alone else {}
    models, processes = list[Any](), ranks().num_processes if together else 1

    def begin(batches: int) -> int:
        watcher.stage(f"{checkpoint.name} writes", batches * batch * (size + lead - 1))
        models.append(load(dtype=str(dtype).removeprefix("torch."), **how))
        free = [free_memory(place) for place in {parameter.device for parameter in models[0].parameters()}]
        least = len(free) * min(of or 0 for of in free)
        if not least:  # some of it is in the memory of the host or on its disk
            return 1
        return max(1, at_once(known, size, dtype, int(min(of_all(least) if together else [least]))) // batch)

    def written(numbers: range) -> Tensor:
        seeds = [batch_seed(seed, number) for number in numbers]
        return samples(
            models[0], size + lead, seed=seeds, batch=batch, progress=lambda count: watcher.update(count * processes)
        )[:, lead:]

    told = f"{content(checkpoint, trust_remote_code)} {start} {lead} {seed} {size} {batch} {dtype}"
    with main_first() if alone else nullcontext():  # the others find it done
        file = kept(told, size, batch, n_blocks, begin, written, together)
    told = f"self {file.stem} {'plain' if plain else MIX}"
    return SampledBlocks(file, size, n_blocks, told, seed, 1 - lead, plain)


def content(checkpoint: Checkpoint, trusted: bool) -> str:
    """What a checkpoint's weights are, as a hash, and whether code that it brings reads them, which is `trusted`."""
    origin = checkpoint.source or checkpoint
    return digest_of(origin, origin.tensors) + " code" * (trusted and "auto_map" in origin.config)


def batch_seed(seed: int, number: int | str) -> int:
    """A batch has a seed of its own: those before need not be sampled again."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7], "big")


def seed_apart(seed: int, use: str) -> int:
    """Of what a model writes for another `use` than calibration, which has the text of the seed itself: what weights
    were fitted to they predict better than any other text, so it would not tell what they are worth.
    """
    return batch_seed(seed, use)


def kept(
    told: str, size: int, batch: int, rows: int, begin: Callable[[int], int], write: Callable[[range], Tensor],
    together: bool = False,
) -> Path:  # fmt: skip
    """A file with `rows` rows of `size` int32 at least, in the cache of `datasets`, named by `told`, which says all
    that decides them. Where batches are not there yet, `begin` is told how many and tells how many are made at a time;
    `write(numbers)` gives (batch, size) of each of these, one below the other. Processes that call it `together` share
    them, and all see the cache. Raises RefusedError.
    """
    from datasets.config import HF_DATASETS_CACHE

    place = Path(HF_DATASETS_CACHE) / "gqa-samples"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.int32"
    own, processes = (ranks().process_index, ranks().num_processes) if together else (0, 1)
    meeting: Callable[[], AbstractContextManager[None]] = main_first if together else nullcontext
    with ExitStack() as held:
        with meeting():
            if own == 0:
                held.enter_context(FileLock(f"{file}.lock"))
                with file.open("ab") as stream:
                    stream.truncate(file.stat().st_size // (4 * size * batch) * 4 * size * batch)  # a part of a batch
        if not file.exists():
            raise RefusedError(f"{place} is another directory to other processes; set HF_HOME to one that all see")
        have, wanted = file.stat().st_size // (4 * size * batch), -(-rows // batch)
        several = begin(wanted - have) if wanted > have else 1
        for first in range(have, wanted, several * processes):
            numbers = range(min(first + own * several, wanted), min(first + (own + 1) * several, wanted))
            found = write(numbers).numpy().astype(np.int32).tobytes() if numbers else b""
            parts = [file.with_suffix(f".{number}") for number in range(1, processes)]
            if own:
                parts[own - 1].write_bytes(found)
            if together:
                wait_for_everyone()
            with meeting():
                if own == 0:
                    with file.open("ab") as stream:
                        stream.write(b"".join([found, *(part.read_bytes() for part in parts)]))
                    for part in parts:
                        part.unlink()
    return file


def _begins(checkpoint: Checkpoint, token: int, trusted: bool) -> bool:
    """Whether the tokenizer begins a text with that token; a model without one is taken to need it."""
    try:
        found = load_tokenizer(checkpoint, trusted)("a")["input_ids"]
    except RefusedError:
        return True
    return bool(found) and found[0] == token


def _batch(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    """As many sequences as SAMPLED_BYTES hold keys and values for: a step takes hardly longer for more of them."""
    return max(1, min(SAMPLED, SAMPLED_BYTES // _cache_bytes(checkpoint, length, dtype)))


def too_large(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> bool:
    """Whether weights in that dtype are more than `device` has free, beside what models leave to what is computed."""
    weights = dtype.itemsize * sum(math.prod(spec.shape) for spec in checkpoint.tensors.values())
    free = free_memory(torch.device(device))
    return free is not None and weights > free * FILLED


def at_once(checkpoint: Checkpoint, length: int, dtype: torch.dtype, free: int) -> int:
    """How many sequences three quarters of so many free bytes hold."""
    vocabulary = int(read_config(checkpoint.config, checkpoint.name).text.vocab_size)
    return min(_MOST, free * 3 // 4 // (_cache_bytes(checkpoint, length, dtype) + DRAWN * vocabulary))


def _cache_bytes(checkpoint: Checkpoint, length: int, dtype: torch.dtype) -> int:
    cache = checkpoint_cache(checkpoint)
    return cache.bytes_per_token // cache.bytes_per_number * dtype.itemsize * length


@torch.no_grad()
def samples(
    model: Any, length: int, *, seed: int | Sequence[int], batch: int,
    progress: Callable[[int], object] = lambda tokens: None,
    given: Mapping[str, Tensor] | None = None, banned: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """(batch, length) token ids, the same for the same seed, batch and machine, none of those that are `banned`; of
    several seeds one batch below the other. Raises RefusedError.

    Nothing stops a sequence: after EOS the model starts another text, as it does in training. `given` is what an
    encoder reads, by the names of its arguments.
    """
    if not hasattr(model, "generate"):
        raise RefusedError(
            f"{model.name_or_path} cannot be sampled from: {type(model).__name__} has no head that predicts tokens; "
            "give text instead of self"
        )
    start = first_token(model.config, model.name_or_path)
    how = GenerationConfig(do_sample=False, max_new_tokens=length - 1, pad_token_id=start)  # Draw does the sampling
    how.eos_token_id, how.decoder_start_token_id, how.suppress_tokens = None, start, list(banned) or None
    model.generation_config = how  # else the checkpoint's own habits (top-p, penalties) fill in what is not set
    seeds = [seed] if isinstance(seed, int) else seed
    draw = LogitsProcessorList([Draw(*(torch.Generator().manual_seed(one) for one in seeds), progress=progress)])
    batch *= len(seeds)
    prompt = torch.full((batch, 1), start, device=model.device)
    try:
        with _quick_steps(model):
            read = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} if given is None else {
                **given, "decoder_input_ids": prompt
            }  # fmt: skip
            # Not the class' own: that of Whisper adds tokens and other searches.
            found: Tensor = GenerationMixin.generate(
                model, **read, generation_config=how, logits_processor=draw, **_cache(model)
            )
    except (ValueError, RuntimeError, TypeError, NotImplementedError, MemoryError) as error:
        told = f"{model.name_or_path} cannot be sampled from: {explain(error)}; give text instead of self"
        if out_of_memory(error):
            told = (
                f"out of memory on {model.device} while {model.name_or_path} writes {batch} samples of {length} "
                "tokens at a time; give shorter blocks, another --device, or text instead of self"
            )
        raise RefusedError(told) from None
    return found.cpu()


class Draw:
    """A logits processor: one token of each row at temperature 1, by the inverse of the distribution function. It takes
    one random number a row; torch.multinomial takes one for each token of the vocabulary, a third of a step's time.
    """

    def __init__(self, *generators: torch.Generator, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Each of `generators` is of as many rows."""
        self._generators, self._progress = generators, progress

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) logits -> the same shape, 0 for the token that is drawn and -inf for all others."""
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        reached = scores.float().softmax(-1).cumsum(-1, dtype=precise)
        each = len(scores) // len(self._generators)
        drawn = torch.cat([torch.rand(each, 1, generator=one, dtype=precise) for one in self._generators])
        drawn = drawn.to(scores.device)
        tokens = torch.searchsorted(reached, drawn * reached[:, -1:], right=True).clamp_max(scores.shape[1] - 1)
        self._progress(len(scores))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


class Room(DynamicLayer):  # type: ignore[misc]
    """A layer's cache with room to grow: transformers' own is copied whole for every token that it takes, which is two
    thirds of the time of a small model.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(B, G, t, d) keys and (B, G, t, e) values of t more tokens -> those of all that have been taken."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = [x[:, :, :0] for x in (key_states, value_states)]
        end = first + key_states.shape[2]
        for number, new in enumerate((key_states, value_states)):
            if end > (old := self._rooms[number]).shape[2]:
                self._rooms[number] = new.new_zeros(*new.shape[:2], -(-end // _MORE) * _MORE, new.shape[3])
                self._rooms[number][:, :, :first] = old[:, :, :first]
            self._rooms[number][:, :, first:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        for part, room in zip((self.keys, self.values), self._rooms, strict=True):
            part.room = room  # type: ignore[attr-defined]
        return self.keys, self.values


def _cache(model: Any) -> dict[str, Any]:
    """The cache to generate into, where the model takes transformers' usual one. Sliding layers stay as they are."""
    if model.config.is_encoder_decoder or not getattr(model, "_supports_default_dynamic_cache", bool)():
        return {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [Room() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return {cache_name(model): cache}


def _quick_steps(model: Any) -> AbstractContextManager[None]:
    """Meanwhile attention of single queries of this model is two plain products on a CPU: torch's kernel takes them one
    by one, which is four times slower in bfloat16. Other models attend as they did.
    """
    if model.device.type != "cpu":
        return nullcontext()
    plain, own = ALL_ATTENTION_FUNCTIONS["sdpa"], set(model.modules())

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        beside = any(options.get(name) is not None for name in ("position_bias", "softcap", "cache"))
        if module not in own or query.shape[2] > 1 or beside:
            whole: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, **options)
            return whole
        return attend_one(query, key, value, attention_mask, options.get("scaling")), None

    return registered({"sdpa": attend})


def attend_one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None) -> Tensor:
    """(B, H, 1, d) queries, (B, G, T, d) keys, (B, G, T, e) values, a mask of (B, 1 or H, 1, T) -> (B, 1, H, e)."""
    groups, scaling = key.shape[1], query.shape[-1] ** -0.5 if scaling is None else scaling
    length = key.shape[2]
    # Products of what is not contiguous copy it first; the rest of the room is zeros.
    key, value = (getattr(part, "room", part) for part in (key, value))
    scores = ((query.unflatten(1, (groups, -1)).squeeze(3) * scaling) @ key.mT)[..., :length]  # (B, G, H / G, T)
    if mask is not None:
        shared = mask if mask.shape[1] == 1 else mask.unflatten(1, (groups, -1)).squeeze(3)
        scores = scores.masked_fill(~shared, -torch.inf) if mask.dtype == torch.bool else scores + shared
    paid = pad(scores.softmax(-1, dtype=torch.float32).to(value.dtype), (0, value.shape[2] - length))
    seen: Tensor = paid @ value
    return seen.flatten(1, 2)[:, None]
