"""The data of a run: made once, by the main process, and read by all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from gqa.checkpoint.read import Checkpoint
from gqa.convert.generate.self_samples import SampledBlocks, derive_seed, sampled_blocks
from gqa.convert.generate.text_pairs import PairMaker
from gqa.core.console import Watcher
from gqa.core.devices import main_first, ranks
from gqa.corpus.encoders import Encoders
from gqa.corpus.pairs import PairEncoder
from gqa.corpus.specs import parse_self
from gqa.corpus.tokens import check_ids
from gqa.models.loading import load_model
from gqa.uptrain.dataloader import Dataloader
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.pair_data import PairDataBuilder
from gqa.uptrain.run_length import largest_block
from gqa.uptrain.text_data import TextDataBuilder


def build_data(
    options: UptrainOptions,
    checkpoint: Checkpoint,
    teacher: Checkpoint | None,
    config: Any,
    tokenizer: Any,
    device: str,
    watcher: Watcher,
) -> Dataloader:
    """The data to train on, which the teacher may write, and the validation blocks, for a
    model of a transformers `config`. Raises RefusedError and TextError.
    """
    # The teacher may have more rows of logits than the model has embeddings.
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    check_ids(len(tokenizer) - 1, vocabulary, checkpoint.name)
    largest = largest_block(config, checkpoint, options)

    # The main process tokenizes, or samples from the teacher; then the others read its cache.
    with main_first():
        pair_encoder = None
        if config.is_encoder_decoder:
            pair_encoder = PairEncoder(config, tokenizer, checkpoint.name)
        encoders = Encoders(
            tokenizer, checkpoint.name, assistant_only_loss=options.assistant_only_loss
        )

        write = None
        if teacher and options.is_generated:
            writer = TextWriter(teacher, options, device, watcher, vocabulary)
            write = writer.write_pairs if pair_encoder else writer.write_text
        text = TextDataBuilder(options, encoders, largest, ranks().num_processes, write)
        if pair_encoder:
            return PairDataBuilder(text, pair_encoder).build()
        return text.build()


@dataclass(frozen=True)
class TextWriter:
    """Has the teacher write the text to train on.

    Attributes:
        teacher: The teacher.
        options: Of the run.
        device: Where it writes.
        watcher: Shows the progress.
        vocabulary: Tokens that the trained model knows.
    """

    teacher: Checkpoint
    options: UptrainOptions
    device: str
    watcher: Watcher
    vocabulary: int

    def write_text(self, size: int, count: int) -> SampledBlocks:
        """`count` blocks of `size` tokens."""
        options = self.options
        load = partial(
            load_model,
            str(self.teacher.directory),
            device=self.device,
            attention=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
        _, is_plain = parse_self(options.data[0])
        return sampled_blocks(
            load,
            self.device,
            self.teacher,
            block_size=size,
            n_blocks=count,
            seed=derive_seed(options.seed, "training"),
            plain=is_plain,
            watcher=self.watcher,
            trust_remote_code=options.trust_remote_code,
            id_limit=self.vocabulary,
        )

    def write_pairs(self, size: int, count: int) -> SampledBlocks:
        """`count` pairs of at most `size` tokens a side."""
        maker = PairMaker(
            self.teacher,
            self.device,
            size,
            self.options.seed,
            self.watcher,
            trust_remote_code=self.options.trust_remote_code,
            vocabulary=self.vocabulary,
            attention=self.options.attn_implementation,
        )
        return maker.stored_pairs(count)
