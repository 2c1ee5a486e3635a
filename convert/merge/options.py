"""How maps are computed, and the calibration text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from gqa.core.console import Watcher
from gqa.core.errors import RefusedError
from gqa.corpus.sources import (
    Exclusion,
    Source,
    check_text_options,
    in_lowest_fraction,
    is_self,
    parse_self,
    parse_source,
    parse_sources,
    row_digest,
    searched_text,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gqa.checkpoint.read import Checkpoint
    from gqa.corpus.encoders import Encoder
    from gqa.corpus.tokens import Ints

_CHARACTERS = 256  # of text to tokenize for each token that is used (a token has about four)
COPIED = 13  # tokens in a row that show that text is the same
_COPY_SHARE = 0.5  # of a block in calibration text, from which on it does not measure the quality
AT_ONCE = 8192  # tokens that go through a layer together, unless one block has more


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: `tokens` in blocks of `length`; for an encoder-decoder pairs with at most
    `length` a side.

    sources: Arguments of `parse_sources`, or `self[:plain][:TOKENS]`. field, target_field,
        separator: Column of text, column of the decoder's text, separator of documents in text
        files.
    repeats: Whether half of the blocks repeat themselves (`with_repeats` in corpus/blocks.py),
        except for `self:plain` and pairs.
    trust_remote_code: Whether code of the checkpoint may run. heldout, heldout_fraction: A source
        whose documents, or the share of documents by hash, that are left out.
    """

    sources: tuple[str, ...] = ("self",)
    tokens: int = 65_536
    length: int = 256
    seed: int = 0
    field: str = "text"
    target_field: str | None = None
    repeats: bool = True
    trust_remote_code: bool = False
    heldout: str | None = None
    heldout_fraction: float = 0.0
    separator: str | None = None

    def inputs(
        self, checkpoint: Checkpoint, device: str, watcher: Watcher, heldout: int = 0
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Inputs of the model's forward by name, and held-out text (M, T) of at most `heldout`
        tokens, None for an encoder-decoder. Raises RefusedError and CorpusError.
        """
        from gqa.convert.heads.config import transformers_config
        from gqa.models.loading import positions

        config = transformers_config(checkpoint.config)
        if config.is_encoder_decoder:
            longest = positions(config)
            # Decoder classes raise this themselves, or accept it
            if longest and self.length > longest:
                raise RefusedError(
                    f"{checkpoint.name} has {longest} positions, --context is {self.length}; give "
                    f"at most {longest}"
                )
            inputs = self._pairs(checkpoint, device, watcher)
            heldout_blocks = None
        else:
            blocks, heldout_blocks = self.split(checkpoint, device, watcher, heldout)
            inputs = {"input_ids": blocks}
        count = len(inputs["input_ids"])
        most = max(1, self.taken // self.length)
        count += 0 if heldout_blocks is None else len(heldout_blocks)
        if count + len(self.sources) <= most:  # of several sources each is rounded
            kind = "pairs" if config.is_encoder_decoder else "blocks"
            requested = f"only {count:,} of {most:,} {kind} of {self.length} tokens"
            watcher.warn(f"{', '.join(self.sources)}: {requested}; give more text")
        return inputs, heldout_blocks

    def _pairs(self, checkpoint: Checkpoint, device: str, watcher: Watcher) -> dict[str, Tensor]:
        from gqa.convert.merge.text_pairs import PairMaker

        if self.target_field and all(map(is_self, self.sources)):
            raise RefusedError(
                "--target-field is a column of --data; self has no columns: name data, or leave it "
                "out"
            )
        trusted = self.trust_remote_code
        maker = PairMaker(checkpoint, device, self.length, self.seed, watcher, trusted)
        pairs = []
        for number, (source, tokens) in enumerate(self.shares()):
            if is_self(source):
                watcher.stage(
                    f"{checkpoint.name} writes", 2 * (tokens // self.length) * self.length
                )
                pairs += maker.write(tokens // self.length, self._seed(number))
            elif self.target_field:
                pairs += maker.read(self._parse(source), tokens // self.length)
            else:
                text = self._parse(source)
                blocks, _ = read_blocks(
                    checkpoint, text, tokens, self.length, self.seed, False, trusted
                )
                pairs += maker.corrupt(blocks)
        return maker.inputs(pairs)

    def split(
        self, checkpoint: Checkpoint, device: str, watcher: Watcher, heldout: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(N, length) token ids, from each source its share; and (M, length) other blocks of the
        same sources, at most `heldout` tokens, without repeats: the last of self-generated text (at
        most an eighth), and what is left of other text. Raises RefusedError and CorpusError.
        """
        import numpy as np
        import torch

        from gqa.convert.merge.self_samples import sampled_blocks
        from gqa.models.loading import load_model

        if self.target_field:
            raise RefusedError(
                f"--target-field is for encoder-decoders, {checkpoint.name} is not one; leave it "
                "out"
            )
        shares = self.shares()
        trusted = self.trust_remote_code
        length = self.length
        load = partial(
            load_model, str(checkpoint.directory), device=device, trust_remote_code=trusted
        )
        parts = []
        for number, (source, tokens) in enumerate(shares):
            most = heldout * tokens // self.taken // length
            if not is_self(source):
                text = self._parse(source)
                pair = read_blocks(
                    checkpoint, text, tokens, length, self.seed, self.repeats, trusted, most
                )
                parts.append((pair[0], without_copies(pair[1], pair[0], source, watcher)))
                continue
            plain = parse_self(source)[1] or not self.repeats
            seed = self._seed(number)
            count = -(-tokens // length)
            written = sampled_blocks(
                load,
                device,
                checkpoint,
                length,
                count,
                seed,
                plain,
                watcher,
                trust_remote_code=trusted,
            )
            first = count - min(most, count // 8)
            unrepeated = replace(written, plain=True) if most else written
            rows = np.stack(
                [(written if i < first else unrepeated)[i]["input_ids"] for i in range(count)]
            )
            parts.append((rows[:first], rows[first:]))
        blocks, rest = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
        return blocks, rest

    def check_sources(self, checkpoint: Checkpoint) -> None:
        """Raise RefusedError or CorpusError for text that cannot be used; checks its beginning."""
        from gqa.corpus.encoders import check_template
        from gqa.models.loading import load_tokenizer

        self.shares()
        data = [spec for spec in self.sources if not is_self(spec)]
        check_text_options(
            (*self.sources, *filter(None, [self.heldout])), self.field, self.separator
        )
        sources: Sequence[Source] = ()
        if data:
            sources = parse_sources(data, field=self.field, target_field=self.target_field)
        local = [source for source in sources if source.files]  # others are not fetched yet
        for source in local:
            next(source.texts())
        if data and not checkpoint.hub_id:
            tokenizer = load_tokenizer(checkpoint, self.trust_remote_code, instead="use self")
            if any(source.chats for source in local):
                check_template(tokenizer, checkpoint.name)

    def identify(self) -> list[str]:
        """Hashes of the content of each source and of `heldout`; names of self-generated text.

        Raises CorpusError.
        """
        specs = (*self.sources, *filter(None, [self.heldout]))
        return [spec if is_self(spec) else self._source(spec).identify() for spec in specs]

    def _source(self, spec: str) -> Source:
        """The source of a spec, held-out documents included."""
        return parse_source(
            spec, field=self.field, target_field=self.target_field, separator=self.separator
        )

    def _parse(self, spec: str) -> Source:
        """The source of a spec without what is held out: documents by a hash of their text, and
        passages.
        """
        from gqa.corpus.passages import Passages

        source = self._source(spec)
        if self.heldout_fraction:
            source = source.without(partial(in_lowest_fraction, fraction=self.heldout_fraction))
            specs = [one for one in self.sources if not is_self(one)]
            heldout = [self._source(one).part(self.heldout_fraction) for one in specs]
        elif self.heldout:
            heldout = [self._source(self.heldout)]
            source = source.without({row_digest(*row) for row in heldout[0].rows()}.__contains__)
        else:
            return source
        # A small source may have no document in the fraction.
        rows = chain.from_iterable(one.rows_if_any() for one in heldout)
        return source.excluding(Exclusion(Passages.of(map(searched_text, rows))))

    def _seed(self, number: int) -> int:
        """The seed of self-generated text for the source of that number: each text has another."""
        from gqa.convert.merge.self_samples import derive_seed

        before = sum(map(is_self, self.sources[:number]))
        return derive_seed(self.seed, f"self {before}") if before else self.seed

    @property
    def taken(self) -> int:
        """Tokens of all sources. Raises RefusedError and CorpusError."""
        return sum(tokens for _, tokens in self.shares())

    def shares(self) -> Sequence[tuple[str, int]]:
        """The sources with their numbers of tokens: `self:TOKENS` states it, the others share
        `tokens` equally. Raises RefusedError and CorpusError.
        """
        fixed = [(parse_self(source)[0] or 0) if is_self(source) else 0 for source in self.sources]
        shares = [
            (source, count or self.tokens // fixed.count(0))
            for source, count in zip(self.sources, fixed, strict=True)
        ]
        if short := [source for source, tokens in shares if tokens < self.length]:
            raise RefusedError(
                f"{short[0]} gives less than a block of {self.length} tokens; "
                "give more calibration tokens (--tokens; "
                "in gqa-ablate --calibration-tokens)"
            )
        return shares


def read_blocks(
    checkpoint: Checkpoint,
    source: Source,
    tokens: int,
    length: int,
    seed: int,
    repeats: bool,
    trust_remote_code: bool = False,
    heldout: int = 0,
) -> tuple[Ints, Ints]:
    """(N, length) pieces of many documents, which are better than a few whole ones; with `repeats`
    some repeat themselves, in the same shares as in self-generated text. And (M, length) other
    pieces, at most `heldout`, of short text an eighth. If a decoder's tokenizer adds no BOS to
    texts, one of START_EVERY pieces begins with it in place of its own first token; chats have what
    their template writes. Raises RefusedError and CorpusError.

    Only documents with _CHARACTERS per token are tokenized, in an order by the hashes of their
    texts and the seed.
    """
    import numpy as np

    from gqa.convert.heads.config import read_config
    from gqa.corpus.blocks import START_EVERY, with_repeats
    from gqa.corpus.encoders import Encoders
    from gqa.corpus.tokens import check_ids, permutation
    from gqa.models.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, trust_remote_code, instead="use self")
    encoder = Encoders(tokenizer, checkpoint.name).of(source)
    digests, characters = zip(
        *((row_digest(text), len(text)) for text in source.texts()), strict=True
    )
    order = permutation(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32), seed)
    read = np.cumsum(np.array(characters)[order])
    needed = _CHARACTERS * tokens
    stream = _encoded(source, order[: int(np.searchsorted(read, needed)) + 1], encoder)
    if len(stream) < tokens:  # long words
        stream = _encoded(source, order, encoder)
    if len(stream) < length:
        raise RefusedError(
            f"{source.spec} has {len(stream)} tokens, fewer than one block of {length}; give more "
            "text"
        )
    pieces = stream[: len(stream) // length * length].reshape(-1, length)
    picks = np.linspace(0, len(pieces) - 1, min(tokens // length, len(pieces))).astype(int)
    rest = np.setdiff1d(np.arange(len(pieces)), picks)
    heldout = min(heldout, max(len(rest), len(pieces) // 8))
    if len(rest) < heldout:
        rest = np.arange(len(pieces))
    rest = rest[np.linspace(0, len(rest) - 1, heldout).astype(int)]
    blocks = pieces[np.setdiff1d(picks, rest)]
    spare = pieces[rest]
    config = read_config(checkpoint.config, checkpoint.name).text
    check_ids(int(pieces.max()), config.vocab_size, checkpoint.name)
    if not encoder.starts_documents and not config.is_encoder_decoder:
        for part in (blocks, spare):
            part[START_EVERY - 1 :: START_EVERY, 0] = encoder.start
    if repeats:
        blocks = np.stack(
            [with_repeats(blocks.__getitem__, i, seed, encoder.start) for i in range(len(blocks))]
        )
    return blocks, spare


def without_copies(heldout: Ints, blocks: Ints, name: str, watcher: Watcher) -> Ints:
    """The held-out blocks (M, T) of which less than half is in calibration blocks (N, T), by COPIED
    tokens in a row; a warning says how many are left out. Text that repeats itself, or is read
    twice, would make the result look better.
    """
    import numpy as np

    if not len(heldout) or heldout.shape[1] < COPIED:
        return heldout
    windows = partial(np.lib.stride_tricks.sliding_window_view, window_shape=COPIED, axis=1)
    # Only the windows of held-out blocks, which are few, are in memory.
    heldout_windows = [[window.tobytes() for window in block] for block in windows(heldout)]
    wanted = set(chain.from_iterable(heldout_windows))
    found = {
        window
        for block in windows(blocks)
        for part in block
        if (window := part.tobytes()) in wanted
    }
    shares = [np.mean([window in found for window in block]) for block in heldout_windows]
    copies = np.array(shares) >= _COPY_SHARE
    if copies.any():
        watcher.warn(
            f"{copies.sum():,} of {len(heldout):,} blocks of {name} that would measure the quality "
            "are in the calibration text too: they are left out"
        )
    return heldout[~copies]


def _encoded(source: Source, chosen: Ints, encoder: Encoder) -> Ints:
    """The tokens of the documents with the `chosen` numbers, joined in that order."""
    import numpy as np

    numbers = set(chosen.tolist())
    texts = [text for number, text in enumerate(source.texts()) if number in numbers]
    encoded = dict(zip(sorted(numbers), encoder.encode(texts), strict=True))
    parts = [np.array(encoded[number].tokens, np.int64) for number in chosen.tolist()]
    return np.concatenate(parts)


@dataclass(frozen=True)
class Refinement:
    """Training of `refined`: steps of `batch` blocks; `learning_rate`, relative to the size of each
    tensor, falls linearly to zero.
    """

    steps: int = 200
    batch: int = 8
    learning_rate: float = 0.01
    # Share of the blocks: not trained on; their error selects the best step
    heldout: float = 1 / 16
    autocast: bool | None = None  # multiply in bfloat16; None: if the device does natively
    seed: int = 0


@dataclass(frozen=True)
class MapsOptions:
    """How maps are computed; methods that read weights alone use `grouping` and `device` only.

    ridge: Strength of the refit of W_O, relative to the mean energy of a head's outputs. batch:
    Blocks that go through a layer at a time, at most; fewer if they have more than AT_ONCE tokens.
    check: Whether to compare both models on held-out text. grouping: `contiguous`; `auto` searches
    for the groups with the least loss if there are few heads.
    """

    text: CalibrationText = field(default_factory=CalibrationText)
    grouping: str = "auto"
    ridge: float = 0.03
    refinement: Refinement = field(default_factory=Refinement)
    dtype: str = "float32"
    device: str = "cpu"
    batch: int = 8
    check: bool = False

    @property
    def at_once(self) -> int:
        """Blocks that go through a layer at a time."""
        return max(1, min(self.batch, AT_ONCE // self.text.length))
