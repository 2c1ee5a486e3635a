"""Pairs of source and target that an encoder-decoder is calibrated on: of a data set, made of plain text as such models
were trained on it, or written by the decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from heapq import nsmallest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gqa.checkpoint.devices import native_bfloat16
from gqa.checkpoint.errors import RefusedError
from gqa.checkpoint.loading import load_model, model_class
from gqa.checkpoint.read import Checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.convert.align.self_samples import first_token, samples
from gqa.convert.align.watcher import Watcher
from gqa.convert.heads.config import transformers_config
from gqa.corpus.sources import Source
from gqa.corpus.tokens import Ints

Pair = tuple[Any, list[int]]  # tokens of a source, or what an encoder hears; and tokens of its target

# As T5 was trained (arXiv 1910.10683, section 3.3.4).
NOISE, SPAN = 0.15, 3.0  # of all tokens, and tokens of a span of it on average
_SENTINELS = 100  # that T5 has
_WRITTEN = 32  # targets at a time


def reads_text(config: Any) -> bool:
    """Whether what the model of transformers' `config` is given are token ids."""
    return bool(getattr(model_class(config), "main_input_name", "input_ids") == "input_ids")


class PairMaker:
    """Pairs of at most `length` tokens each for one model whose encoder reads text. Raises RefusedError."""

    def __init__(
        self, checkpoint: Checkpoint, device: str, length: int, seed: int, watcher: Watcher,
        trust_remote_code: bool = False,
    ) -> None:  # fmt: skip
        config, self._name = transformers_config(checkpoint.config), checkpoint.name
        longest = getattr(config, "max_position_embeddings", None)
        if longest and length > longest:
            raise RefusedError(f"{self._name} has {longest} positions, --context is {length}; give at most {longest}")
        self._checkpoint, self._config, self._device, self._watcher = checkpoint, config, device, watcher
        self._length, self._seed, self._trusted = length, seed, trust_remote_code
        self._model: Any = None  # once it is to write
        text = config.get_text_config(decoder=True)
        self._start, self._vocabulary = first_token(config, self._name), int(text.vocab_size)

    def read(self, source: Source, targets: Source | None, count: int) -> list[Pair]:
        """So many pairs of two columns of one data set, chosen by a hash of their place and the seed; targets that are
        None are written by the decoder. Raises RefusedError and CorpusError.
        """
        tokenizer = load_tokenizer(self._checkpoint, self._trusted)
        known = {found.name: found.text for found in targets.documents()} if targets else None
        rows = (found for found in source.documents() if known is None or found.name in known)
        chosen = nsmallest(
            count, rows, key=lambda found: hashlib.sha256(f"{self._seed} {found.name}".encode()).digest()
        )
        if not chosen:
            raise RefusedError(f"no row of {source.spec} has both a source and a target; name two columns that belong")
        if known and all(known[found.name] == found.text for found in chosen):
            raise RefusedError(f"--field and --target-field of {source.spec} are the same text; name two columns")
        how = {"truncation": True, "max_length": self._length, "verbose": False}
        sources = [list(tokenizer(found.text, **how)["input_ids"]) for found in chosen]
        if known is None:
            return list(zip(sources, self._write(sources), strict=True))
        answers = (list(tokenizer(text_target=known[found.name], **how)["input_ids"]) for found in chosen)
        return [(one, other[other[:1] == [self._start] :]) for one, other in zip(sources, answers, strict=True)]

    def corrupt(self, blocks: Ints) -> list[Pair]:
        """Of plain text (N, T): spans are left out and asked for, as sentinels of the tokenizer (T5) or one mask token
        for each (BART) allow. Raises RefusedError where it has neither.
        """
        marks = self._marks()
        if not marks:
            raise RefusedError(
                f"the tokenizer of {self._name} has neither sentinels nor a mask token, so plain text makes no pairs: "
                "give pairs with --field and --target-field, or --target-field self"
            )
        generator = np.random.default_rng(self._seed)
        return [corrupted(block, marks, self._end, generator) for block in blocks]

    def write(self, count: int) -> list[Pair]:
        """So many pairs of the model's own: what its decoder writes for no source at all, spans left out where the
        tokenizer allows it, and the targets that it then writes.
        """
        marks = self._marks()
        texts = self._write([[self._end]] * count, [*marks, self._end])
        generator = np.random.default_rng(self._seed)
        sources = [corrupted(np.array(text), marks, self._end, generator)[0] for text in texts] if marks else [
            [*text, self._end] for text in texts
        ]  # fmt: skip
        return list(zip(sources, self._write(sources), strict=True))

    def inputs(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """What the model is given, by the names of its forward's arguments, padded at the end. Raises RefusedError."""
        read, mask = self._padded([self._start, *target[:-1]] for _, target in pairs)
        return self.given([source for source, _ in pairs]) | {"decoder_input_ids": read, "decoder_attention_mask": mask}

    def given(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        """What the encoder is, by the names of its forward's arguments."""
        ids, mask = self._padded(sources)
        return {"input_ids": ids, "attention_mask": mask}

    def _padded(self, texts: Iterable[list[int]]) -> tuple[Tensor, Tensor]:
        """(N, T) ids and which of them are text. Raises RefusedError."""
        rows = [torch.tensor(text, dtype=torch.long) for text in texts]
        if (largest := max(int(row.max()) for row in rows)) >= self._vocabulary:
            raise RefusedError(
                f"the tokenizer of {self._name} gives token {largest}, its embedding has {self._vocabulary}; they do "
                "not belong together"
            )
        masks = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return pad_sequence(rows, batch_first=True, padding_value=self._config.pad_token_id or 0), masks

    @property
    def _end(self) -> int:
        """The token that ends a text."""
        end = self._config.get_text_config(decoder=True).eos_token_id
        end = end[0] if isinstance(end, list) else end
        return self._start if end is None else int(end)

    def _marks(self) -> list[int]:
        """What stands for spans: T5's sentinels in their order, else a mask token, if there is a tokenizer."""
        try:
            tokenizer = load_tokenizer(self._checkpoint, self._trusted)
        except RefusedError:
            return []
        known = tokenizer.get_vocab()
        found = [known[name] for name in (f"<extra_id_{i}>" for i in range(_SENTINELS)) if name in known]
        return found or ([] if tokenizer.mask_token_id is None else [tokenizer.mask_token_id])

    def _write(self, sources: Sequence[Any], banned: Sequence[int] = ()) -> list[list[int]]:
        """What the decoder writes at temperature 1 for each source: up to its end, or `length` tokens, none of those
        that are `banned`.
        """
        if self._model is None:
            dtype = "bfloat16" if native_bfloat16(self._device) else "float32"
            self._model = load_model(str(self._checkpoint.directory), dtype=dtype, device=self._device)
        self._watcher.stage(f"{self._name} writes", len(sources) * self._length)
        found: list[list[int]] = []
        for first in range(0, len(sources), _WRITTEN):
            given = self.given(part := sources[first : first + _WRITTEN])
            given = {
                name: tensor.to(self._device, self._model.dtype if tensor.is_floating_point() else None)
                for name, tensor in given.items()
            }
            written = samples(
                self._model, self._length + 1, seed=self._seed + first, batch=len(part), given=given, banned=banned,
                progress=self._watcher.update,
            )  # fmt: skip
            for row in written[:, 1:].tolist():
                found.append(row[: row.index(self._end) + 1] if self._end in row else row)
        return found


def corrupted(ids: Ints, marks: Sequence[int], end: int, generator: np.random.Generator) -> Pair:
    """Tokens (T,) -> the source with a mark for each span of noise, and the target: the spans, each behind its mark;
    or, with a single mark for all, the whole text.
    """
    noise = min(max(round(NOISE * len(ids)), 1), len(ids) - 1)
    most = noise if len(marks) == 1 else min(noise, len(marks))
    spans = max(1, min(round(noise / SPAN), most, len(ids) - noise))

    def cut(total: int) -> list[int]:
        places = np.sort(generator.choice(total - 1, spans - 1, replace=False)) + 1
        return [int(size) for size in np.diff([0, *places, total])]

    source, target, at = list[int](), list[int](), 0
    for number, (kept, lost) in enumerate(zip(cut(len(ids) - noise), cut(noise), strict=True)):
        mark = marks[number % len(marks)]
        source += [*ids[at : at + kept].tolist(), mark]
        target += [mark, *ids[at + kept : at + kept + lost].tolist()]
        at += kept + lost
    return [*source, end], [*(ids.tolist() if len(marks) == 1 else target), end]
