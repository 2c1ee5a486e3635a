"""Train a small T5 on Python's standard library: function bodies from signatures and docstrings,
and span corruption.

    python examples/pretrain_t5.py --out stdlib-t5

It takes 15 minutes on two cores. Half of the batches are pairs: signature and docstring of a
function, and its body; the others are text with spans left out, as T5 was trained (arXiv
1910.10683). It begins with the tokenizer and layers of `examples/stdlib-mha`; sentinels,
cross-attention and the bias by distance are new. The pairs of training and held-out modules are
written to `train.jsonl` and `heldout.jsonl`, in columns `source` and `target`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from pretrain import BOS, EOS, LOG, descend, optimizers_of, rate, windows
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, processors
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from gqa.corpus.pairs import corrupt_spans
from gqa.corpus.stdlib import stdlib_texts

EMBEDDED = Path(__file__).parent / "stdlib-mha"
SENTINELS = [f"<extra_id_{number}>" for number in range(100)]
LENGTH = 128  # tokens of a source, and of a target
# A gated T5 with the widths and heads of the embedded checkpoint.
CONFIG = {
    "d_ff": 688,
    "d_kv": 32,
    "d_model": 256,
    "decoder_start_token_id": BOS,
    "dropout_rate": 0.0,
    "eos_token_id": EOS,
    "feed_forward_proj": "gated-silu",
    "num_decoder_layers": 6,
    "num_heads": 8,
    "num_layers": 3,
    "pad_token_id": BOS,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "scale_decoder_outputs": False,
    "vocab_size": 4096 + len(SENTINELS),
}

# The embedded checkpoint's tensors of a layer, and T5's.
NAMES = {
    "input_layernorm": "0.layer_norm",
    "mlp.down_proj": "{mlp}.DenseReluDense.wo",
    "mlp.gate_proj": "{mlp}.DenseReluDense.wi_0",
    "mlp.up_proj": "{mlp}.DenseReluDense.wi_1",
    "post_attention_layernorm": "{mlp}.layer_norm",
    "self_attn.k_proj": "0.SelfAttention.k",
    "self_attn.o_proj": "0.SelfAttention.o",
    "self_attn.q_proj": "0.SelfAttention.q",
    "self_attn.v_proj": "0.SelfAttention.v",
}

Pair = tuple[list[int], list[int]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The embedded checkpoint's with T5's sentinels, ending every text as T5's does."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in SENTINELS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="<s>",
        extra_special_tokens=SENTINELS,
        clean_up_tokenization_spaces=False,
    )


def functions(texts: Iterable[str]) -> Iterator[dict[str, str]]:
    """Signatures with docstrings as `source`, bodies as `target`, of functions that have both."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except SyntaxError:  # of another version of Python
            continue

        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            body = node.body[1:]
            if docstring and body:
                kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
                source = f'{kind} {node.name}({ast.unparse(node.args)}):\n"""{docstring}"""'
                yield {"source": source, "target": "\n".join(map(ast.unparse, body))}


def encoded(rows: Iterable[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[Pair]:
    """Token ids of pairs whose source and target fit."""
    pairs = list[Pair]()
    for row in rows:
        source = tokenizer(row["source"])["input_ids"]
        target = tokenizer(row["target"])["input_ids"]
        if max(len(source), len(target)) <= LENGTH:
            pairs.append((source, target))
    return pairs


def batch_of(pairs: Iterable[Pair], device: str) -> dict[str, torch.Tensor]:
    """Inputs of the model: ids (B, S), their mask, labels (B, T) with -100 as padding."""
    sources = list[torch.Tensor]()
    targets = list[torch.Tensor]()
    for source, target in pairs:
        sources.append(torch.tensor(source))
        targets.append(torch.tensor(target))

    masks = [torch.ones_like(source) for source in sources]
    batch = {
        "input_ids": pad_sequence(sources, batch_first=True, padding_value=BOS),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(targets, batch_first=True, padding_value=-100),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_model(device: str) -> T5ForConditionalGeneration:
    """With the embedded checkpoint's layers, the first ones in the encoder too.

    What they lose is the rotary embedding: a bias by distance is learnt instead. T5 divides no
    scores; cross-attention adds nothing at first.
    """
    model = T5ForConditionalGeneration(T5Config(**CONFIG))
    embedded = load_file(EMBEDDED / "model.safetensors")
    tensors = model.state_dict()
    layers = {"encoder": CONFIG["num_layers"], "decoder": CONFIG["num_decoder_layers"]}
    for stack, count in layers.items():
        tensors[f"{stack}.final_layer_norm.weight"] = embedded["model.norm.weight"]
        mlp = 1 if stack == "encoder" else 2
        for number in range(count):
            block = f"{stack}.block.{number}.layer"
            for theirs, ours in NAMES.items():
                tensor = embedded[f"model.layers.{number}.{theirs}.weight"].float()
                if theirs == "self_attn.q_proj":
                    tensor = tensor * CONFIG["d_kv"] ** -0.5
                tensors[f"{block}.{ours.format(mlp=mlp)}.weight"] = tensor

                if stack == "decoder" and theirs.startswith("self_attn"):
                    cross = ours.replace("0.Self", "1.EncDec")
                    if theirs.endswith("o_proj"):
                        tensor = torch.zeros_like(tensor)
                    tensors[f"{block}.{cross}.weight"] = tensor

    rows = embedded["model.embed_tokens.weight"].float()
    rows_of_sentinels = torch.randn(len(SENTINELS), rows.shape[1]) * rows.std()
    tensors["shared.weight"] = torch.cat([rows, rows_of_sentinels])
    for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
        tensors[f"{name}.weight"] = tensors["shared.weight"]  # tied
    model.load_state_dict(tensors)
    return model.to(device)


def make_optimizers(model: T5ForConditionalGeneration, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, the output and the norms."""
    looked_up = ("shared", "lm_head", "relative_attention_bias")
    matrices = list[torch.nn.Parameter]()
    others = list[torch.nn.Parameter]()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or any(part in name for part in looked_up):
            others.append(parameter)
        else:
            matrices.append(parameter)
    return optimizers_of(matrices, [{"params": others}], peak)


@torch.no_grad()
def mean_nats(model: T5ForConditionalGeneration, pairs: list[Pair], device: str) -> float:
    """Per token of the targets."""
    model.eval()
    nats = 0.0
    count = 0
    for first in range(0, len(pairs), 16):
        batch = batch_of(pairs[first : first + 16], device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(**batch).logits.float()
        labels = batch["labels"].flatten()
        nats += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels, reduction="sum"
        ).item()
        count += int((labels >= 0).sum())
    model.train()
    return nats / count


class Texts:
    """Pairs of functions and blocks of text of one split."""

    def __init__(self, split: str, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
        texts = list(stdlib_texts(split))
        rows = list(functions(texts))
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.pairs = encoded(rows, tokenizer)
        ids = np.concatenate([tokenizer(text, verbose=False)["input_ids"] for text in texts])
        self.stream = torch.from_numpy(ids.astype(np.int64))
        self.marks = tokenizer.convert_tokens_to_ids(SENTINELS)

    def spans(self, offset: int, count: int, generator: np.random.Generator) -> Iterator[Pair]:
        """`count` blocks from `offset` on, in a random order, with spans left out."""
        blocks = windows(self.stream, LENGTH, offset).numpy()
        for index in generator.permutation(len(blocks))[:count]:
            source, target = corrupt_spans(blocks[index], self.marks, generator)
            yield [*source, EOS], [*target, EOS]


def batches(texts: Texts, size: int, seed: int) -> Iterator[list[Pair]]:
    """Without end: `size` pairs of functions, then twice as many blocks, whose targets are short,
    in turn.
    """
    order = random.Random(seed)
    generator = np.random.default_rng(seed)
    pairs = list[Pair]()
    spans = list[Pair]()
    while True:
        if len(pairs) < size:
            pairs = order.sample(texts.pairs, len(texts.pairs))
        if len(spans) < 2 * size:
            spans = list(texts.spans(order.randrange(LENGTH), 200 * size, generator))
        yield [pairs.pop() for _ in range(size)]
        yield [spans.pop() for _ in range(2 * size)]


def train(args: argparse.Namespace, texts: Texts, heldout: Texts) -> T5ForConditionalGeneration:
    torch.manual_seed(args.seed)
    model = make_model(args.device)
    optimizers = make_optimizers(model, args.peak)
    heldout_spans = list(heldout.spans(0, 400, np.random.default_rng(0)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{parameters:,} parameters, {len(texts.pairs):,} functions, {len(texts.stream):,} tokens; "
        f"{len(heldout.pairs)} functions held out"
    )

    start = time.monotonic()
    tokens = 0
    with (args.out / LOG).open("w") as log:
        for step, pairs in enumerate(batches(texts, args.batch, args.seed)):
            minutes = (time.monotonic() - start) / 60
            scale = rate(minutes / args.minutes)
            done = bool(step) and scale == 0.0

            if done or step % args.log_every == 0:
                record = {"step": step, "minutes": round(minutes, 2), "target_tokens": tokens}
                few = slice(None) if done else slice(0, 64)
                functions_nats = mean_nats(model, heldout.pairs[few], args.device)
                spans_nats = mean_nats(model, heldout_spans[few], args.device)
                record["functions_nats"] = round(functions_nats, 4)
                record["spans_nats"] = round(spans_nats, 4)
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(record, flush=True)
            if done:
                break

            batch = batch_of(pairs, args.device)
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(**batch).loss
            descend(model, loss, optimizers, scale)
            tokens += int((batch["labels"] >= 0).sum())
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("stdlib-t5"))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--batch", type=int, default=8, help="functions a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    texts = Texts("train", tokenizer, args.out)
    heldout = Texts("heldout", tokenizer, args.out)
    model = train(args, texts, heldout)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
