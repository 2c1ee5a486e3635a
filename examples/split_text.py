"""Split text of your own into the files that the guide uses, and count their tokens.

    python examples/split_text.py my-text.jsonl ./Llama-2-7b-hf --context 2048

Each line of the file is a JSON object with `text`, or with a chat in `messages` or, as in ShareGPT,
in `conversations`. Lines are shuffled,
and one that occurs twice is kept once. The first go to heldout.jsonl, the next to validation.jsonl,
the rest to train.jsonl. Put what belongs together, such as all turns of a chat, into one line:
otherwise parts of it are trained on, and others are measured on. The text must fit into memory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

FILES = ("heldout.jsonl", "validation.jsonl", "train.jsonl")
CHATS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT; others are the same


def read_lines(path: Path) -> list[str]:
    """The lines of a file, each once, in an order that is always the same. Checks each of them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {path} cannot be read ({error}); pass a file of JSON lines in UTF-8")

    # `splitlines` would also cut at separators that JSON allows within a text
    lines = [line for line in text.split("\n") if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            sys.exit(f"error: line {number} of {path} is not JSON ({error})")
        if not isinstance(row, dict) or not any(row.get(name) for name in ("text", *CHATS)):
            sys.exit(
                f"error: line {number} of {path} has neither `text` nor a chat in `messages` or "
                "`conversations`; put a prompt and its answer into one `text`, as your application "
                "sends them"
            )

    distinct = list(dict.fromkeys(lines))
    random.Random(0).shuffle(distinct)
    return distinct


def count_tokens(line: str, tokenizer: Any) -> int:
    """Tokens of a line, a chat in the template of the tokenizer. Ends if there is none."""
    row = json.loads(line)
    if row.get("text"):
        return len(tokenizer(row["text"])["input_ids"])

    if not tokenizer.chat_template:
        sys.exit(
            f"error: the tokenizer of {tokenizer.name_or_path} has no chat template; write each "
            "chat as `text`"
        )
    messages = row.get("messages") or [
        {"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
        for turn in row["conversations"]
    ]
    return len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"])


def parts(
    lines: list[str], tokens: list[int], heldout: int, validation: int
) -> Iterator[tuple[list[str], list[int]]]:
    """Lines and their tokens of each file: of the first two as many as reach the given numbers of
    tokens, of the last what is left.
    """
    first = 0
    for wanted in (heldout, validation):
        end = first
        counted = 0
        while end < len(lines) and counted < wanted:
            counted += tokens[end]
            end += 1
        yield lines[first:end], tokens[first:end]
        first = end
    yield lines[first:], tokens[first:]


def main() -> None:
    """Write the files into the working directory, unless one of them is there already."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="JSON lines with text or chats")
    parser.add_argument("model", help="the model whose tokens are counted: a directory or model id")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a request and answer")
    parser.add_argument("--heldout", type=int, default=200_000, help="tokens of heldout.jsonl")
    parser.add_argument("--validation", type=int, default=50_000, help="of validation.jsonl")
    arguments = parser.parse_args()

    for name in FILES:
        if Path(name).exists():
            sys.exit(f"error: {name} exists; move it away")
    lines = read_lines(arguments.file)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = [count_tokens(line, tokenizer) for line in lines]

    of_files = list(parts(lines, tokens, arguments.heldout, arguments.validation))
    if not of_files[-1][0]:
        sys.exit(
            f"error: {arguments.file} has {sum(tokens):,} tokens, so nothing is left to train on; "
            "lower --heldout, or use the whole file as heldout.jsonl"
        )
    for name, (of_file, counts) in zip(FILES, of_files, strict=True):
        Path(name).write_text("".join(f"{line}\n" for line in of_file), encoding="utf-8")
        print(f"{name:17} {sum(counts):>12,} tokens in {len(counts):,} lines")

    if median(tokens) < arguments.context:
        print(
            f"Half of the lines have fewer than {arguments.context:,} tokens (--context): with "
            "them, nothing is measured at the end of long requests."
        )


if __name__ == "__main__":
    main()
