"""What models write after the same beginning, side by side.

    make try

converts the example model and calls this script with the base model and the converted one. The
continuations are greedy, so they are the same on every run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from gqa.convert.summary import describe_quality, loss_of
from gqa.convert.verdict import MEANINGS

PROMPT = '''def read_lines(path):
    """Return the lines of a text file."""
'''
NEW_TOKENS = 48
NARROWEST = 30  # characters of a column
ADVICE = (
    "Compare how fluent the texts are, not whether they are right: {sizes}. After the first "
    "different token each model goes on from its own text. One text shows little."
)


class Sample(NamedTuple):
    """What a model writes.

    Attributes:
        text: The prompt and its most probable continuation.
        kv_heads: The KV heads of the model.
        parameters: The number of its parameters.
    """

    text: str
    kv_heads: int
    parameters: int


def continuation(model_name: str, prompt: str, new_tokens: int) -> Sample:
    """What a model writes after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
    written = tokens[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(written, skip_special_tokens=True)
    return Sample(prompt + text, model.config.num_key_value_heads, model.num_parameters())


def wrap(text: str, width: int) -> list[str]:
    """The lines of a text; longer ones are cut into pieces, so that indents stay."""
    lines: list[str] = []
    for line in text.expandtabs(4).splitlines():
        pieces = [line[start : start + width] for start in range(0, len(line), width)]
        lines += pieces or [""]
    return lines


def side_by_side(columns: list[tuple[str, str]], width: int) -> str:
    """A heading and a text for each column, as lines of at most `width` characters."""
    column_width = max((width + 3) // len(columns) - 3, NARROWEST)
    wrapped = [
        [heading, "-" * len(heading), *wrap(text, column_width)] for heading, text in columns
    ]
    rows = zip_longest(*wrapped, fillvalue="")
    return "\n".join(" | ".join(cell.ljust(column_width) for cell in row).rstrip() for row in rows)


def measured(model_name: str) -> str:
    """What the conversion measured of its result; empty if there is no record of that."""
    record = Path(model_name) / "gqa_conversion.json"
    if not record.is_file():
        return ""

    conversion = json.loads(record.read_text())
    quality = conversion.get("quality")
    if quality is None:
        return ""

    cache = conversion["kv_cache"]
    factor = cache["bytes_per_token_before"] / cache["bytes_per_token_after"]
    text = describe_quality(quality, "text that the base model generated")
    level = loss_of(quality).level
    meaning = f"{level} ({MEANINGS[level]})" if level else "not measured"
    return f"{meaning}: KV cache {factor:.3g}x smaller, {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a directory or a model id")
    parser.add_argument("--prompt", default=PROMPT, help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="how many tokens to write")
    args = parser.parse_args()

    logging.disable_progress_bar()
    torch.manual_seed(0)
    columns = []
    sizes = []
    for name in args.models:
        sample = continuation(name, args.prompt, args.tokens)
        short_name = name.rstrip("/").rpartition("/")[2]
        columns.append((f"{sample.kv_heads} KV heads ({short_name})", sample.text))
        sizes.append(f"{short_name} has {sample.parameters / 1e6:.1f} million parameters")

    width = shutil.get_terminal_size((100, 24)).columns
    print(side_by_side(columns, width))
    print()
    print(textwrap.fill(ADVICE.format(sizes=", ".join(sizes)), width))
    if result := measured(args.models[-1]):
        print()
        print(textwrap.fill(f"Result: {result}", width))


if __name__ == "__main__":
    main()
