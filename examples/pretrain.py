"""Train the embedded checkpoint `examples/stdlib-mha`: a small multi-head Llama on Python's
standard library.

    python examples/pretrain.py --minutes 85 --context 512 --batch 16 --plain 1 --out first
    python examples/pretrain.py --minutes 75 --start first --out second
    python examples/pretrain.py --minutes 95 --peak 3e-3 --drawn 0.5 --start second \\
        --out examples/stdlib-mha

From the second stage on half of the windows repeat themselves: so small a model does not learn from
code alone to find things again in its context.

Everything it needs is on the machine: the corpus is the running Python's own source
(`gqa.corpus.stdlib`; held-out modules are never read here except to report the loss). Needs the
`dev` extra for sentencepiece. The learning rate follows the elapsed share of `--minutes`, so the
run ends with a finished decay on a fast and on a slow machine alike.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import shutil
import time
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from gqa.corpus.blocks import repeat_start
from gqa.corpus.stdlib import stdlib_texts

BOS = 1
EOS = 2
LOG = "training_log.jsonl"
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
# Written by hand and not by `save_pretrained`: transformers 4 does not find the rotary base that
# version 5 writes.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 688,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 4096,
}


def train_tokenizer(texts: list[str], out: Path) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE model (what llama.cpp's converter reads) and the same tokenizer as
    `tokenizer.json`.
    """
    lines = list[str]()
    for text in texts:
        lines += [line for line in text.split("\n") if line.strip() and len(line) < 2000]

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=CONFIG["vocab_size"],
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["\n"],
        max_sentence_length=8192,
        minloglevel=2,
    )

    (out / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    write_fast_tokenizer(processor, out)
    return processor


def write_fast_tokenizer(processor: sentencepiece.SentencePieceProcessor, out: Path) -> None:
    """The SentencePiece model again in the `tokenizers` format; `main` checks that both agree."""
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}

    # A merge is known by its result; SentencePiece numbers results in the order of merging
    merges = []
    for piece in pieces:
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        known = [(a, b) for a, b in splits if a in vocab and b in vocab]
        merges += sorted(known, key=lambda ab: (vocab[ab[0]], vocab[ab[1]]))

    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.add_tokens([AddedToken("\n", normalized=False, special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(out / "tokenizer.json"))


def write_settings(out: Path) -> None:
    """What transformers reads beside tokenizer.json."""
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (out / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def token_stream(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> torch.Tensor:
    """All documents as one stream, each between BOS and EOS. Shape (tokens,), int64."""
    ids = np.concatenate([[BOS, *processor.encode(text), EOS] for text in texts])
    return torch.from_numpy(ids.astype(np.int64))


def windows(stream: torch.Tensor, length: int, offset: int) -> torch.Tensor:
    """Disjoint windows of `length` tokens from `offset` on. Shape (windows, length)."""
    count = (len(stream) - offset) // length
    return stream[offset : offset + count * length].view(count, length)


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: torch.Tensor, context: int, device: str) -> float:
    """Mean nats per token over disjoint windows, the first token of each unscored."""
    model.eval()
    nats = 0.0
    count = 0
    for batch in windows(stream, context, 0).split(8):
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=batch.to(device)).logits[:, :-1].float()
        targets = batch[:, 1:].to(device)
        nats += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ).item()
        count += targets.numel()
    model.train()
    return nats / count


def repeating(
    batch: torch.Tensor, plain: float, drawn: float, random: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of windows as it stands in a share `plain`, else repeating itself: input ids and
    labels, (B, T) each.

    Of the others a share `drawn` are random tokens again and again, whose first copies are not
    scored. Of what is left two thirds have one to four of their passages once more further on, and
    a third are their beginning again and again.
    """
    ids = batch.numpy().copy()
    labels = ids.copy()
    if plain == 1:
        return torch.from_numpy(ids), torch.from_numpy(labels)

    # Below 0: plain; from 0 to 1: uniform among the windows that repeat themselves
    draws = (random.random(len(ids)) - plain) / (1 - plain)
    for row, draw in enumerate(draws):
        if draw < 0:
            continue
        if draw < (1 - drawn) * 2 / 3:
            labels[row] = ids[row] = copied(ids[row], int(random.integers(1, 5)), random)
        elif draw < 1 - drawn:
            labels[row] = ids[row] = repeat_start(ids[row], random)
        else:
            tokens = random.choice(batch.flatten().numpy(), len(ids[row]))
            ids[row], is_second = twice(tokens, random)
            labels[row] = np.where(is_second, ids[row], -100)
    return torch.from_numpy(ids), torch.from_numpy(labels)


def copied(block: np.ndarray, copies: int, random: np.random.Generator) -> np.ndarray:
    """A window with `copies` of its passages inserted once more further on; what follows moves
    back. Shape (T,).

    Lengths are uniform in their logarithm between 16 and a quarter of the window, places uniform.
    """
    length = len(block)
    for _ in range(copies):
        passage = round(math.exp(random.uniform(math.log(16), math.log(max(length // 4, 16)))))
        start = random.integers(0, length - 2 * passage, endpoint=True)
        place = random.integers(start + passage, length - passage, endpoint=True)
        parts = [block[:place], block[start : start + passage], block[place:]]
        block = np.concatenate(parts)[:length]
    return block


def twice(tokens: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Passages, each followed by itself, and which tokens are of second copies. Shapes (T,), (T,).

    Lengths of passages are uniform in their logarithm between 16 and a quarter of T.
    """
    length = len(tokens)
    places = []
    second = []
    while len(places) < length:
        passage = round(math.exp(random.uniform(math.log(16), math.log(max(length // 4, 16)))))
        start = len(places)
        places += [*range(start, start + passage)] * 2
        second += [False] * passage + [True] * passage
    return tokens[np.minimum(places[:length], length - 1)], np.array(second[:length])


@torch.no_grad()
def second_copies(model: LlamaForCausalLM, stream: torch.Tensor, length: int, device: str) -> float:
    """Share of tokens that are the most likely one, in second copies of 64 passages of `length`
    tokens.
    """
    model.eval()
    passages = windows(stream, length, 0)
    passages = passages[torch.linspace(0, len(passages) - 1, 64).long()]
    copies = torch.cat([torch.full((64, 1), BOS), passages, passages], dim=1).to(device)
    with torch.autocast(device, torch.bfloat16):
        hits = model(input_ids=copies).logits[:, :-1].argmax(-1) == copies[:, 1:]
    model.train()
    return hits[:, length + 1 :].float().mean().item()


def optimizers_of(
    matrices: list[torch.nn.Parameter], others: list[dict[str, object]], peak: float
) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW without decay for groups of others, which may have a rate of their
    own.
    """
    muon = torch.optim.Muon(
        matrices, lr=peak, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=peak, weight_decay=0.0, betas=(0.9, 0.95))
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return [muon, adamw]


def save_checkpoint(model: LlamaForCausalLM, out: Path) -> None:
    """bfloat16 weights under the names transformers reads.

    The tied output layer is not stored twice.
    """
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
    del state["lm_head.weight"]

    partial = out / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def rate(progress: float) -> float:
    """Share of the peak learning rate: warm-up for 1% of the run, then constant, then a linear
    decay to zero over the last 60%.
    """
    if progress >= 1:
        return 0.0
    warm_up = min(progress / 0.01, 1.0)
    decay = min((1 - progress) / 0.6, 1.0)
    return warm_up * decay


def descend(
    model: torch.nn.Module,
    loss: torch.Tensor,
    optimizers: list[torch.optim.Optimizer],
    scale: float,
) -> None:
    """One step of all optimizers, at `scale` of their rates."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def train(args: argparse.Namespace, train_stream: torch.Tensor, heldout: torch.Tensor) -> None:
    """Train for `--minutes`; write the log, and the checkpoint from time to time and at the end."""
    torch.manual_seed(args.seed)
    order = random.Random(args.seed)
    repeats = np.random.default_rng(args.seed)

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().to(args.device)
    if args.start:
        # The output layer is tied
        model.load_state_dict(load_file(args.start / "model.safetensors"), strict=False)

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    others = [{"params": embedding}, {"params": norms, "lr": args.peak / 2}]
    optimizers = optimizers_of(matrices, others, args.peak)

    log = (args.out / LOG).open("a")
    # A seventh of the held-out text, for the log
    sample = windows(heldout, args.context, 0)[::7].flatten()
    start = time.monotonic()
    step = 0
    tokens = 0
    while True:
        blocks = windows(train_stream, args.context, order.randrange(args.context))
        indices = list(range(len(blocks)))
        order.shuffle(indices)

        for first in range(0, len(indices) - args.batch + 1, args.batch):
            elapsed = time.monotonic() - start
            progress = elapsed / (args.minutes * 60)
            scale = rate(progress)

            if scale == 0.0 and step:
                final = heldout_loss(model, heldout, args.context, args.device)
                record = {
                    "step": step,
                    "tokens": tokens,
                    "minutes": round(elapsed / 60, 2),
                    "context": args.context,
                }
                record["second_copies"] = round(second_copies(model, heldout, 64, args.device), 4)
                log.write(json.dumps(record | {"heldout_loss": round(final, 4)}) + "\n")
                log.close()
                save_checkpoint(model, args.out)
                print(f"done: {step} steps, {tokens:,} tokens, held-out {final:.4f} nats/token")
                return

            batch = blocks[indices[first : first + args.batch]]
            # Short windows: what repeats is near, which is learnt first
            if args.plain < 1 and step % 3 == 2:
                batch = batch.reshape(-1, 128)
            batch, labels = repeating(batch, args.plain, args.drawn, repeats)
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(input_ids=batch.to(args.device), labels=labels.to(args.device)).loss
            descend(model, loss, optimizers, scale)
            step += 1
            tokens += batch.numel()

            if step % args.log_every == 0:
                record = {"step": step, "tokens": tokens, "minutes": round(elapsed / 60, 2)}
                record |= {
                    "loss": round(loss.item(), 4),
                    "tokens_per_s": round(tokens / max(elapsed, 1e-9)),
                }
                if step % (10 * args.log_every) == 0:
                    sample_loss = heldout_loss(model, sample, args.context, args.device)
                    recall = second_copies(model, heldout, 64, args.device)
                    record["heldout_sample"] = round(sample_loss, 4)
                    record["second_copies"] = round(recall, 4)
                    save_checkpoint(model, args.out)
                log.write(json.dumps(record) + "\n")
                log.flush()
                print(record, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("examples/stdlib-mha"))
    parser.add_argument(
        "--start", type=Path, help="begin with the weights and the tokenizer of this directory"
    )
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument(
        "--plain", type=float, default=0.5, help="share of windows that do not repeat themselves"
    )
    parser.add_argument(
        "--drawn", type=float, default=0.25, help="of the others, share of random tokens"
    )
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens a window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    texts = list(stdlib_texts("train"))
    if args.start:
        for name in (*TOKENIZER_FILES, LOG):
            shutil.copyfile(args.start / name, args.out / name)
        processor = sentencepiece.SentencePieceProcessor(str(args.out / "tokenizer.model"))
    else:
        (args.out / LOG).unlink(missing_ok=True)
        processor = train_tokenizer(texts, args.out)
    write_settings(args.out)

    heldout_texts = list(stdlib_texts("heldout"))
    fast = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    for text in heldout_texts:
        if fast.encode(text, add_special_tokens=False).ids != processor.encode(text):
            raise SystemExit("tokenizer.json and tokenizer.model disagree")

    train_stream = token_stream(processor, texts)
    heldout = token_stream(processor, heldout_texts)
    characters = sum(map(len, texts))
    print(
        f"{len(train_stream):,} training tokens ({characters / len(train_stream):.2f} characters "
        f"each), {len(heldout):,} held out; uniform loss {math.log(CONFIG['vocab_size']):.2f}"
    )
    train(args, train_stream, heldout)


if __name__ == "__main__":
    main()
