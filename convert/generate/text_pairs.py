"""Source-target pairs to calibrate an encoder-decoder on: from a data set, from plain text
corrupted as in pretraining, or written by the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.read import Checkpoint
from gqa.convert.generate.sample_store import store_batches
from gqa.convert.generate.sampling import sample_sequences
from gqa.convert.generate.self_samples import SampledBlocks, derive_seed, samples_identity
from gqa.convert.heads.config import transformers_config
from gqa.core.console import Watcher
from gqa.core.devices import fast_dtype
from gqa.core.errors import RefusedError
from gqa.corpus.pairs import PairEncoder, TokenPair
from gqa.corpus.rows import row_digest
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Ints, check_ids
from gqa.models.loading import load_model
from gqa.models.tokenizer import load_tokenizer

_BATCH = 32  # pairs that are written at a time


class PairMaker:
    """Makes pairs of at most `length` tokens a side for a model whose encoder reads text.

    It reads them from a data set (`read`), corrupts plain text (`corrupt`), or has the model write
    them (`write`; `stored_pairs` keeps them). `inputs` makes tensors of them.
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
        attention: str | None = None,
    ) -> None:
        """
        Args:
            checkpoint: The model.
            device: Where it writes.
            length: Tokens of a side, at most.
            seed: Of the choice of pairs and of what is written.
            watcher: Shows the progress.
            trust_remote_code: Whether to run the checkpoint's code.
            vocabulary: Token ids of generated pairs are below it, if another model with fewer
                rows reads them.
            attention: The attention implementation of transformers; None: that of the class.

        Raises:
            RefusedError: The config names no first token.
        """
        config = transformers_config(checkpoint.config)
        self.name = checkpoint.name
        self.length = length
        self._checkpoint = checkpoint
        self._device = device
        self._watcher = watcher
        self._seed = seed
        self._trusted = trust_remote_code
        self._attention = attention
        self._dtype = str(fast_dtype(device)).removeprefix("torch.")
        self._model: Any = None  # loaded by the first `_sample_texts`

        self._vocabulary = int(config.get_text_config(decoder=True).vocab_size)
        self._id_limit: int | None = None  # of generated ids, if not that of the model
        if vocabulary is not None and vocabulary < self._vocabulary:
            self._id_limit = vocabulary

        try:
            tokenizer = load_tokenizer(checkpoint, trust_remote_code)
        except RefusedError:  # raised later, when text is read
            tokenizer = None
        self._encoder = PairEncoder(config, tokenizer, checkpoint.name)

    def read(self, source: Source, count: int) -> list[TokenPair]:
        """`count` pairs of a data set, chosen by a hash of seed and text.

        Warns if some are cut. Raises RefusedError and TextError.
        """
        rows = nsmallest(count, source.rows(), key=lambda row: row_digest(str(self._seed), *row))
        load_tokenizer(self._checkpoint, self._trusted)  # raises if there is none

        encoder = self._encoder
        sources = encoder.encode([source_text for source_text, _ in rows])
        targets = encoder.encode([target_text for _, target_text in rows], target=True)
        pairs = list(zip(sources, targets, strict=True))

        cut = sum(encoder.cuts(*pair, self.length) for pair in pairs)
        if cut:
            self._watcher.warn(
                f"{cut:,} of {len(pairs):,} pairs have more than {self.length} tokens a side, "
                "and are cut"
            )
        return [encoder.add_special_tokens(*pair, self.length) for pair in pairs]

    def corrupt(self, blocks: Ints) -> list[TokenPair]:
        """Pairs from plain text (N, T) by `PairEncoder.corrupt`. Raises RefusedError."""
        generator = np.random.default_rng(self._seed)
        return [self._encoder.corrupt(block, generator) for block in blocks]

    def write(self, count: int, seed: int) -> list[TokenPair]:
        """`count` generated pairs.

        The source is what the decoder writes for an empty source, with spans replaced by marks if
        the tokenizer has them. The target is what the decoder writes for that source.
        """
        encoder = self._encoder
        empty_sources = [[encoder.end]] * count
        texts = self._sample_texts(empty_sources, seed, banned=[*encoder.marks, encoder.end])

        generator = np.random.default_rng(seed)
        sources = []
        for text in texts:
            if encoder.marks:
                source, _ = encoder.corrupt(np.array(text), generator)
            else:
                source = [*text[:-1], encoder.end]
            sources.append(source)

        targets = self._sample_texts(sources, derive_seed(seed, "targets"))
        return list(zip(sources, targets, strict=True))

    def stored_pairs(self, n_blocks: int) -> SampledBlocks:
        """`n_blocks` generated pairs as blocks, stored in the cache (`store_batches`).

        A block has `length` places for the source and as many for the target, each padded with -1:
        a pair has 2 x `length` tokens, or fewer if a text ends before. Raises RefusedError.
        """
        block_size = 2 * self.length
        path = store_batches(
            self._identify(),
            block_size=block_size,
            batch_size=_BATCH,
            n_blocks=n_blocks,
            sample=self._batches_of_pairs,
        )
        fingerprint = f"self {path.stem}"
        return SampledBlocks(path, block_size, n_blocks, fingerprint, self._seed, 0, plain=True)

    def _identify(self) -> str:
        """Everything that determines the generated pairs.

        It names cached files: where one character of it changes, all pairs are generated again.
        """
        model = samples_identity(self._checkpoint, self._trusted)
        identity = (
            f"own pairs {model} {self._encoder.marks} {self._seed} {self.length} {self._dtype}"
        )
        if self._id_limit is not None:
            identity += f" below {self._id_limit}"
        return identity

    def _batches_of_pairs(self, batch_indices: Sequence[int]) -> Iterator[Tensor]:
        """Write the batches of pairs with these indices, one after the other.

        Yields (_BATCH, 2 x `length`) each.
        """
        tokens_of_batch = _BATCH * 2 * self.length
        self._watcher.stage(f"{self.name} writes", len(batch_indices) * tokens_of_batch)
        for index in batch_indices:
            pairs = self.write(_BATCH, derive_seed(self._seed, index))
            rows = torch.full((_BATCH, 2, self.length), -1)
            for row, (source, target) in zip(rows, pairs, strict=True):
                row[0, : len(source)] = torch.tensor(source)
                row[1, : len(target)] = torch.tensor(target)
            yield rows.flatten(1)

    def inputs(self, pairs: Sequence[TokenPair]) -> dict[str, Tensor]:
        """Padded inputs (N, T) by argument name of the model's forward. Raises RefusedError."""
        # The decoder reads its start token and all of the target but the last token.
        start = self._encoder.start
        decoder_ids, decoder_mask = self._padded([start, *target[:-1]] for _, target in pairs)

        ids, mask = self._padded(source for source, _ in pairs)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": decoder_ids,
            "decoder_attention_mask": decoder_mask,
        }

    def _padded(self, texts: Iterable[list[int]]) -> tuple[Tensor, Tensor]:
        """Right-padded ids (N, T) and mask (N, T), 1 for text. Raises RefusedError."""
        rows = [torch.tensor(text, dtype=torch.long) for text in texts]
        check_ids(max(int(row.max()) for row in rows), self._vocabulary, self.name)
        masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return pad_sequence(rows, batch_first=True, padding_value=self._encoder.pad), masks

    def _sample_texts(
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
                attention=self._attention,
                trust_remote_code=self._trusted,
            )

        end = self._encoder.end
        texts: list[list[int]] = []
        for first in range(0, len(sources), _BATCH):
            part = sources[first : first + _BATCH]
            ids, mask = self._padded(part)
            encoder_inputs = {
                "input_ids": ids.to(self._device),
                "attention_mask": mask.to(self._device),
            }
            rows = sample_sequences(
                self._model,
                self.length + 1,
                seeds=[seed + first],
                sequences_per_seed=len(part),
                encoder_inputs=encoder_inputs,
                banned=banned,
                progress=self._watcher.update,
                id_limit=self._id_limit,
            )
            for row in rows[:, 1:].tolist():  # without the decoder's start token
                length = row.index(end) + 1 if end in row else len(row)
                texts.append(row[:length])
        return texts
