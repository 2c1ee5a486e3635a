"""A tokenizer that is code beside weights: `support.embedded.bring_tokenizer` copies this file."""

from transformers import PreTrainedTokenizerFast


class Ours(PreTrainedTokenizerFast):
    pass
