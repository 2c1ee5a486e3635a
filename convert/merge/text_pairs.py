"""Source-target pairs to calibrate an encoder-decoder on: from a data set, from plain text
corrupted as in pretraining, or written by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.read import Checkpoint
from gqa.convert.heads.config import transformers_config
from gqa.convert.merge.self_samples import (
    SampledBlocks,
    derive_seed,
    samples,
    samples_identity,
    store_batches,
)
from gqa.core.console import Watcher
from gqa.core.devices import fast_dtype
from gqa.core.errors import RefusedError
from gqa.corpus.pairs import PairEncoder, TokenPair
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Ints, check_ids
from gqa.models.loading import load_model, load_tokenizer

WRITTEN = 32  # pairs written per batch


class PairMaker:
    """Makes pairs of at most `length` tokens a side for a model whose encoder reads text.

    Raises RefusedError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str,
        length: int,
        seed: int,
        watcher: Watcher,
        trust_remote_code: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: token ids of self-generated pairs are below it, if another model with fewer
        rows reads them.
        """
        config = transformers_config(checkpoint.config)
        self.name = checkpoint.name
        self._checkpoint = checkpoint
        self._device = device
        self._watcher = watcher
        self.length = length
        self._seed = seed
        self._trusted = trust_remote_code
        self._vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        self._limit = (
            vocabulary if vocabulary is not None and vocabulary < self._vocabulary else None
        )
        self._model: Any = None  # loaded by the first `_write`
        self._dtype = str(fast_dtype(device)).removeprefix("torch.")
        try:
            tokenizer = load_tokenizer(checkpoint, trust_remote_code)
        except RefusedError:  # raised later, when text is read
            tokenizer = None
        self._encoder = PairEncoder(config, tokenizer, checkpoint.name)

    def read(self, source: Source, count: int) -> list[TokenPair]:
        """`count` pairs of a data set, chosen by a hash of text and seed.

        Warns if some are cut. Raises RefusedError and CorpusError.
        """
        chosen = nsmallest(count, source.rows(), key=lambda row: row_digest(str(self._seed), *row))
        sources, targets = zip(*chosen, strict=True) if chosen else ((), ())
        load_tokenizer(self._checkpoint, self._trusted)
        pairs = list(
            zip(
                self._encoder.encode(sources),
                self._encoder.encode(targets, target=True),
                strict=True,
            )
        )
        if cut := sum(self._encoder.cuts(*both, self.length) for both in pairs):
            self._watcher.warn(
                f"{cut:,} of {len(pairs):,} pairs are longer, and cut to {self.length} tokens a "
                "side"
            )
        return [self._encoder.add_special_tokens(*both, self.length) for both in pairs]

    def corrupt(self, blocks: Ints) -> list[TokenPair]:
        """Pairs from plain text (N, T) by `PairEncoder.corrupt`. Raises RefusedError."""
        generator = np.random.default_rng(self._seed)
        return [self._encoder.corrupt(block, generator) for block in blocks]

    def write(self, count: int, seed: int) -> list[TokenPair]:
        """`count` self-generated pairs.

        Source: what the decoder writes for an empty source, with spans replaced by marks if the
        tokenizer has them; target: what the decoder writes for that source.
        """
        encoder = self._encoder
        generator = np.random.default_rng(seed)
        texts = self._write([[encoder.end]] * count, seed, [*encoder.marks, encoder.end])
        sources = [
            encoder.corrupt(np.array(text), generator)[0]
            if encoder.marks
            else [*text[:-1], encoder.end]
            for text in texts
        ]
        return list(zip(sources, self._write(sources, derive_seed(seed, "targets")), strict=True))

    def sampled(self, count: int) -> SampledBlocks:
        """Blocks of 2 x `length` tokens: self-generated pairs as in `write`, each side padded with
        -1, stored by `store_batches`. Raises RefusedError.
        """
        size = 2 * self.length

        def sample(numbers: Sequence[int]) -> Iterable[Tensor]:
            self._watcher.stage(f"{self.name} writes", 2 * WRITTEN * len(numbers) * self.length)
            for number in numbers:
                rows = torch.full((WRITTEN, 2, self.length), -1)
                for row, pair in enumerate(self.write(WRITTEN, derive_seed(self._seed, number))):
                    for side, ids in enumerate(pair):
                        rows[row, side, : len(ids)] = torch.tensor(ids)
                yield rows.flatten(1)

        known = samples_identity(self._checkpoint, self._trusted)
        identity = (
            f"own pairs {known} {self._encoder.marks} {self._seed} {self.length} {self._dtype}"
        )
        identity += "" if self._limit is None else f" below {self._limit}"
        path = store_batches(identity, size, WRITTEN, count, sample)
        return SampledBlocks(path, size, count, f"self {path.stem}", self._seed, 0, plain=True)

    def inputs(self, pairs: Sequence[TokenPair]) -> dict[str, Tensor]:
        """Padded inputs (N, T) by argument name of the model's forward. Raises RefusedError."""
        read, mask = self._padded([self._encoder.start, *target[:-1]] for _, target in pairs)
        ids, source_mask = self._padded(source for source, _ in pairs)
        return {
            "input_ids": ids,
            "attention_mask": source_mask,
            "decoder_input_ids": read,
            "decoder_attention_mask": mask,
        }

    def _padded(self, texts: Iterable[list[int]]) -> tuple[Tensor, Tensor]:
        """Right-padded ids (N, T) and mask (N, T), 1 for text. Raises RefusedError."""
        rows = [torch.tensor(text, dtype=torch.long) for text in texts]
        check_ids(max(int(row.max()) for row in rows), self._vocabulary, self.name)
        masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return pad_sequence(rows, batch_first=True, padding_value=self._encoder.pad), masks

    def _write(
        self, sources: Sequence[list[int]], seed: int, banned: Sequence[int] = ()
    ) -> list[list[int]]:
        """Sample a text at temperature 1 for each source: up to EOS or `length` tokens, without
        `banned` tokens.
        """
        if self._model is None:
            self._model = load_model(
                str(self._checkpoint.directory),
                dtype=self._dtype,
                device=self._device,
                trust_remote_code=self._trusted,
            )
        texts: list[list[int]] = []
        for first in range(0, len(sources), WRITTEN):
            ids, mask = self._padded(part := sources[first : first + WRITTEN])
            encoder_inputs = {
                "input_ids": ids.to(self._device),
                "attention_mask": mask.to(self._device),
            }
            written = samples(
                self._model,
                self.length + 1,
                seeds=[seed + first],
                batch=len(part),
                encoder_inputs=encoder_inputs,
                banned=banned,
                progress=self._watcher.update,
                vocabulary=self._limit,
            )
            for row in written[:, 1:].tolist():
                texts.append(
                    row[: row.index(self._encoder.end) + 1] if self._encoder.end in row else row
                )
        return texts
