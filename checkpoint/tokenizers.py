"""The tokenizer of a checkpoint."""

from typing import Any

from gqa.checkpoint.custom_code import MODEL_TYPES, config_class
from gqa.checkpoint.errors import RefusedError, explain
from gqa.checkpoint.files import TOKENIZER_FILES
from gqa.checkpoint.read import Checkpoint, read_json


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool = False, instead: str = "") -> Any:
    """The checkpoint's tokenizer; `instead` is what else the user may do where it has none.

    Raises RefusedError where there is none, or none that transformers can load. Of some classes it makes an empty one
    where there are no files, or none but those of the special tokens.
    """
    from transformers import AutoTokenizer

    directory, advice = checkpoint.directory, f", or {instead}" if instead else ""
    none = RefusedError(
        f"{checkpoint.name} has no tokenizer; copy its base model's tokenizer files into {directory}{advice}"
    )
    if not any(any(directory.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise none
    try:
        model_type = read_json(directory, "config.json").get("model_type")  # a view's is another
        ours = {"config": config_class(model_type).from_pretrained(directory)} if model_type in MODEL_TYPES else {}
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=trust_remote_code, **ours)
        words = set(tokenizer.get_vocab()).difference(tokenizer.all_special_tokens)
    except Exception as error:  # whatever a library raises about files that it cannot read
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise RefusedError(
                f"the tokenizer of {checkpoint.name} is code that it brings; look at it, and give "
                f"--trust-remote-code to run it{advice}"
            ) from error
        raise RefusedError(
            f"transformers cannot load the tokenizer of {checkpoint.name}: {explain(error)}; repair its files{advice}"
        ) from error
    if len(words) < 2:
        raise none
    return tokenizer
