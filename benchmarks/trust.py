"""Methods, quantized caches and what others do, at the same bytes of KV cache: one table for each
model.

    python benchmarks/trust.py --out trust                                   # the embedded model
    python benchmarks/trust.py --out trust --model SmolLM2-135M-Instruct \
        --text stories.txt --text wikitext2-test.txt

Rows: fewer heads by `mean`, `first`, `energy` (the head of each group with the largest attention
output on samples of the model: PruneKVHeads of NVIDIA's ModelOpt) and each --method; a cache in
FP8, or of 8, 4 or 2 bits; the last --method with FP8, 8 or 4 bits; and `no attention`: the
attention that changes hidden states least is removed until the bytes are as few.

A model that was uptrained elsewhere is a row, too: put it, or a link to it, at
DIR/MODEL-HEADS-uptrained, and name --method uptrained last.

Columns: bytes of the cache; perplexity ratio on each --text with its 95% interval, in windows of
--context; KL divergence on the first; recall of text and of random tokens, in windows of
--recall-context; tokens until a greedy text leaves the base model's; exact answers to closed
questions, as transformers' generate() writes them; time of a decode step at batch 8.

Each row is appended to DIR/MODEL-*.jsonl, a file for each choice of texts, windows and precision:
the same command continues. The table is printed, and written to DIR/MODEL.md.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from harness import EMBEDDED, Measurements

import gqa
from gqa.convert.generate.sampling import sample_sequences
from gqa.eval.cache_formats import CACHE_FORMATS, CacheFormatName
from gqa.eval.decode import time_decoding
from gqa.eval.evaluate import Comparison
from gqa.eval.metrics import recall_by_kind
from gqa.eval.options import EvaluateOptions
from gqa.eval.recall import greedy_texts
from gqa.eval.subjects import open_subjects
from gqa.eval.text import read_text
from gqa.models.loading import load_model

BITS: tuple[CacheFormatName, ...] = ("fp8", 8, 4, 2)
BITS_OF_FEWER_HEADS: tuple[CacheFormatName, ...] = ("fp8", 8, 4)
COUNT = 150  # questions of a kind
LONGEST = 24  # tokens of an answer
NAMES = [
    "name",
    "value",
    "path",
    "index",
    "count",
    "line",
    "text",
    "node",
    "size",
    "start",
    "end",
    "file",
    "mode",
    "type",
    "data",
    "item",
    "list",
    "head",
    "tail",
]
FUNCTIONS = [  # signature, what it returns, how, and arguments
    ("add(a, b)", "the sum of a and b", "a + b", [2, 5]),
    ("is_even(n)", "whether n is even", "n % 2 == 0", [6]),
    ("last(items)", "the last item", "items[-1]", [[1, 2, 7]]),
    ("first(items)", "the first item", "items[0]", ["xy"]),
    ("square(x)", "the square of x", "x * x", [7]),
    ("upper(text)", "text in upper case", "text.upper()", ["ab"]),
    ("size(items)", "the length of items", "len(items)", [[3, 4]]),
    ("double(x)", "twice x", "2 * x", [9]),
    ("total(numbers)", "the sum of numbers", "sum(numbers)", [[1, 5]]),
    ("negate(x)", "minus x", "-x", [3]),
    ("larger(a, b)", "the larger of a and b", "max(a, b)", [4, 8]),
    ("strip(s)", "s stripped", "s.strip()", [" a "]),
    ("contains(items, item)", "whether item is in items", "item in items", [[1, 2], 2]),
    ("join(words)", "the words, joined by spaces", "' '.join(words)", [["a", "b"]]),
]
CHECK = """import builtins, json, sys
allowed = "abs len max min sum sorted reversed str list".split()
names = {"__builtins__": {name: getattr(builtins, name) for name in allowed}}
arguments, expressions, values = json.loads(sys.argv[1])
one, other = (eval(f"lambda {arguments}: {code}", names)(*values) for code in expressions)
sys.exit((type(one), one) != (type(other), other))"""


def questions() -> Iterator[tuple[str, str, Any]]:
    """Kind, prompt, and the first line of the answer.

    Of code each of `FUNCTIONS` after one of three others.
    """
    draw = random.Random(0)
    for _ in range(COUNT):
        yield "copy", *copy_question(draw)
        yield "variable", *variable_question(draw)
        yield "sum", *sum_question(draw)

    for function in FUNCTIONS:
        signature, result, _, _ = function
        others = [other for other in FUNCTIONS if other is not function]
        for example_signature, example_result, code, _ in draw.sample(others, 3):
            example = beginning_of(example_signature, example_result) + f" {code}\n\n\n"
            yield "code", example + beginning_of(signature, result), function


def copy_question(draw: random.Random) -> tuple[str, str]:
    """Eight assignments, and the same again up to the value of the last."""
    words = [draw.sample(NAMES, 4) for _ in range(8)]
    *lines, last = (f"    self.{a} = {b}.{c}({d})" for a, b, c, d in words)
    start, _, answer = last.partition(" = ")
    return "\n".join(["", *lines, last, "", *lines, f"{start} ="]), answer


def variable_question(draw: random.Random) -> tuple[str, str]:
    """Six assignments of numbers, the values of two of them, and that of a third."""
    values = dict(zip(draw.sample(NAMES, 6), draw.sample(range(10, 100), 6), strict=True))
    one, two, name = draw.sample([*values], 3)
    lines = [f"{key} = {value}" for key, value in values.items()]
    lines += [f"print({shown})  # {values[shown]}" for shown in (one, two)]
    return "\n".join([*lines, f"print({name})  #"]), str(values[name])


def sum_question(draw: random.Random) -> tuple[str, str]:
    """Four sums, and another one."""
    *sums, (a, b) = (draw.choices(range(1, 10), k=2) for _ in range(5))
    lines = [f"{c} + {d} = {c + d}" for c, d in sums]
    return "\n".join([*lines, f"{a} + {b} ="]), str(a + b)


def beginning_of(signature: str, result: str) -> str:
    """A function up to what it returns."""
    return f'def {signature}:\n    """Return {result}."""\n    return'


def is_right(answer: str, expected: Any) -> bool:
    """Whether the answer is `expected`.

    Of code, returns the same in a process with a few builtins.
    """
    if isinstance(expected, str):
        return answer == expected

    signature, _, code, values = expected
    arguments = signature.partition("(")[2].rstrip(")")
    words = [sys.executable, "-I", "-c", CHECK, json.dumps([arguments, [answer, code], values])]
    try:
        return subprocess.run(words, capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def exact_answers(model: Any, tokenizer: Any) -> dict[str, float]:
    """Share of right answers by kind."""
    by_kind = defaultdict[str, list[tuple[str, Any]]](list)
    for kind, prompt, expected in questions():
        by_kind[kind].append((prompt, expected))

    shares = dict[str, float]()
    for kind, pairs in by_kind.items():
        openings: list[list[int]] = [tokenizer(prompt)["input_ids"] for prompt, _ in pairs]

        hits = list[bool]()
        for text, (_, expected) in zip(greedy_texts(model, openings, LONGEST), pairs, strict=True):
            answer = tokenizer.decode(text.ids[-text.scored :], skip_special_tokens=True)
            line = answer.lstrip(" ").partition("\n")[0].rstrip()
            hits.append(is_right(line, expected))
        shares[kind] = statistics.mean(hits)
    return shares


@torch.no_grad()
def keep_strongest(model: Any, groups: int, ids: torch.Tensor) -> None:
    """Keep the head of each group of neighbors whose part of the attention output is largest on
    `ids`.
    """
    heads = model.config.num_key_value_heads
    sizes_of_layers = list[torch.Tensor]()

    def measure(output: Any, inputs: Any) -> None:
        sizes = list[torch.Tensor]()
        for values, weight in zip(
            inputs[0].chunk(heads, -1), output.weight.chunk(heads, 1), strict=True
        ):
            sizes.append((values @ weight.T).norm(dim=-1).mean())
        sizes_of_layers.append(torch.stack(sizes))

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(measure)
    model(input_ids=ids, use_cache=False)

    for layer, sizes in zip(model.model.layers, sizes_of_layers, strict=True):
        first_of_groups = torch.arange(groups) * (heads // groups)
        best = first_of_groups + sizes.view(groups, -1).argmax(1)
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            for name, tensor in [*linear.named_parameters()]:
                kept = tensor.unflatten(0, (heads, -1))[best].flatten(0, 1)
                setattr(linear, name, torch.nn.Parameter(kept))
    model.config.num_key_value_heads = groups


@torch.no_grad()
def remove_attention(model: Any, groups: int, ids: torch.Tensor) -> None:
    """Silence attention where the hidden states before and after it are most similar on `ids`, in
    as many layers as a cache of `groups` heads in every layer saves.
    """
    hidden_states = list[torch.Tensor]()  # before attention
    attention_outputs = list[torch.Tensor]()
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: hidden_states.append(inputs[0]))
        layer.self_attn.register_forward_hook(
            lambda module, inputs, outputs: attention_outputs.append(outputs[0])
        )
    model(input_ids=ids, use_cache=False)

    similar = [
        torch.cosine_similarity(hidden, hidden + output, -1).mean()
        for hidden, output in zip(hidden_states, attention_outputs, strict=True)
    ]
    left = len(similar) * groups // model.config.num_key_value_heads
    for number in torch.stack(similar).argsort()[left:].tolist():
        model.model.layers[number].self_attn.o_proj.weight.zero_()


PEERS = {"energy": keep_strongest, "no attention": remove_attention}


class Trial:
    """A base model, and what its rows are compared with: its predictions, its recall, its greedy
    texts.
    """

    def __init__(
        self,
        work: Path,
        model: str,
        texts: Sequence[str],
        methods: Sequence[str],
        recall_context: int,
        **options: Any,
    ) -> None:
        self.work = work
        self.methods = methods
        self.base = open_subjects([model])[0]
        self.options = EvaluateOptions(
            (model,), kl=True, quiet=True, decode_batches=(8,), decode_steps=16, **options
        )

        # By text; of the base model
        self.comparisons = list[Comparison]()
        self.records = list[dict[str, Any]]()
        for text in texts:
            chosen = replace(self.options, data=(text,))
            context = options["context"]
            comparison = Comparison(self.base, read_text([self.base], chosen, context), chosen)
            if not self.comparisons:
                comparison.prepare_recall(recall_context)
            self.records.append(comparison.measure(self.base, {}, alone=True))
            self.comparisons.append(comparison)

    def rows(self) -> Iterator[tuple[str, str, int, CacheFormatName | None]]:
        """Name, method, KV heads and format of the cache of each row."""
        heads = self.base.config.num_key_value_heads
        yield "base model", "", heads, None
        for bits in BITS:
            yield CACHE_FORMATS[bits].name, "", heads, bits

        last_method = self.methods[-1]
        for groups in range(heads - 1, 0, -1):
            if heads % groups:
                continue
            for method in ("mean", "first", *PEERS, *self.methods):
                yield f"{method}, {groups} of {heads}", method, groups, None
            for bits in BITS_OF_FEWER_HEADS:
                name = f"{last_method}, {groups} of {heads}, {CACHE_FORMATS[bits].name}"
                yield name, last_method, groups, bits

    def checkpoint(self, method: str, groups: int) -> str:
        """The converted checkpoint, written once."""
        if not method:
            return self.base.path

        out = self.work / f"{self.base.name}-{groups}-{method.replace(' ', '-')}"
        if out.exists():
            return str(out)

        if method in PEERS:
            model = load_model(self.base.path)
            ids = sample_sequences(model, 256, seeds=[7], sequences_per_seed=16)
            PEERS[method](model, groups, ids)
            model.save_pretrained(out)
            self.base.tokenizer.save_pretrained(out)
        else:
            gqa.convert_model(
                self.base.path, kv_heads=groups, method=method, output=out, quiet=True
            )
        return str(out)

    def measure(self, method: str, groups: int, bits: CacheFormatName | None) -> dict[str, Any]:
        """One row."""
        (subject,) = open_subjects([self.checkpoint(method, groups)])
        subject = replace(subject, cache_format=bits)
        records = self.records
        ratios: list[tuple[float, float, float]] = []  # with the ends of the interval, by text
        divergence = 0.0
        if method or bits:
            records = [comparison.measure(subject, {}) for comparison in self.comparisons]
            for record in records:
                compared = record["against_baseline"]
                ratios.append((compared["ratio"], compared["ratio_low"], compared["ratio_high"]))
            divergence = records[0]["against_baseline"]["kl"]["mean"]

        # All models are run, so they cache, in the same dtype, whatever they are stored in.
        whole = self.base.cache
        cache = replace(subject.cache, bytes_per_number=whole.bytes_per_number)
        share = cache.bytes_per_token / whole.bytes_per_token
        if method == "no attention":
            layers = self.base.config.num_hidden_layers
            heads = self.base.config.num_key_value_heads
            share = layers * groups // heads / layers

        row = {
            "bytes": share,
            "perplexity": [record["quality"]["token_perplexity"] for record in records],
            "ratios": ratios,
            "kl": divergence,
            "recall": recall_by_kind(records[0]),
            "greedy": records[0]["greedy"]["tokens"],
            "exact": exact_answers(subject.load(self.options.precision), self.base.tokenizer),
        }
        if method == self.methods[-1] and not bits:
            timed: list[dict[str, Any]] = [{}, {}]
            time_decoding([self.base, subject], timed, self.options, (self.options.context,))
            seconds = [record["decode"]["points"][0]["seconds_per_token"] for record in timed]
            row["decode"] = seconds[1] / seconds[0]
        return row


def table(rows: dict[str, dict[str, Any]], texts: Sequence[str]) -> str:
    """Markdown, the largest cache first."""
    base = rows["base model"]
    titles = ["", "KV cache"]
    titles += [Path(text).stem for text in texts]
    titles += ["KL", "recall, text", "random", "greedy", *base["exact"], "decode"]
    lines = [titles, ["---"] * len(titles)]

    for name, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"]):
        cells = [name, f"{row['bytes']:.2f}"]
        for ratio, low, high in row["ratios"]:
            cells.append(f"x{ratio:,.3g} ({low:,.3g}-{high:,.3g})")
        if not row["ratios"]:
            cells += [f"{perplexity:.3g}" for perplexity in row["perplexity"]]
        cells.append(f"{row['kl']:.2f}")
        cells += [f"{row['recall'][kind]:.0%}" for kind in ("text", "random")]
        cells.append(f"{row['greedy']:.0f}")
        cells += [f"{share:.0%}" for share in row["exact"].values()]
        if "decode" in row:
            cells.append(f"x{row['decode']:.2f}")
        else:
            cells.append("")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="For rows, tables and conversions.",
)
@click.option("--model", type=click.Path(exists=True), default=str(EMBEDDED), show_default=False)
@click.option(
    "--text", "texts", multiple=True, help="Several times.  [default: stdlib:heldout, click's code]"
)
@click.option(
    "--method", "methods", multiple=True, default=("calibrated", "refined"), help="Several times."
)
@click.option("--tokens", default=20_000, help="Of each text.")
@click.option("--context", default=512, help="Tokens of a window that is scored.")
@click.option("--recall-context", default=512, help="Tokens of a question about the context.")
@click.option("--precision", default="float32")
@click.option(
    "--only",
    multiple=True,
    help="Measure rows whose names contain this, and the base model. Several times.",
)
def main(
    out: Path, model: str, texts: tuple[str, ...], only: tuple[str, ...], **options: Any
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if not texts:
        code_of_click = out / "click.txt"
        files = Path(click.__file__).parent.glob("*.py")
        code_of_click.write_text("\n".join(file.read_text() for file in files))
        texts = ("stdlib:heldout", str(code_of_click))

    trial = Trial(out, model, texts, **options)
    # Rows of other texts, windows or questions are of another table.
    asked_of_all = [COUNT, *map(Path, texts), options["tokens"], options["context"]]
    asked_of_all += [options["recall_context"], options["precision"]]
    table_id = hashlib.sha256(repr(asked_of_all).encode()).hexdigest()[:8]
    rows = Measurements(out / f"{trial.base.name}-{table_id}.jsonl")
    for name, *parts in trial.rows():
        asked = not only or any(part in name for part in only)
        if asked or name == "base model":
            rows.measure(name, trial.measure, *parts)

    measured = {name: row for name, row in rows.rows.items() if "error" not in row}
    text = table(measured, texts)
    (out / f"{trial.base.name}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
