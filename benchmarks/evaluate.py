"""gqa-eval's scoring beside a bare forward pass and lm-evaluation-harness: time and peak memory in one run.

    python benchmarks/evaluate.py                       # a random model of SmolLM2-135M's shape, 49,152 tokens wide
    python benchmarks/evaluate.py --model examples/stdlib-mha --windows 64 --repeats 5

All score the same windows of held-out text with the same model and number of threads, each run in a process of its
own, in an order that changes from round to round; the clock starts when the model is loaded. `bare forward` computes
logits and throws them away: what no evaluator can be faster than while it uses that forward. Memory is the highest
resident set while scoring, above what it was with the model loaded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

EMBEDDED = Path(__file__).parents[1] / "examples" / "stdlib-mha"
MIB = 1 << 20


def write_model(directory: Path) -> Path:
    """A random Llama of SmolLM2-135M's proportions, with the embedded tokenizer (whose ids it can all predict)."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=9, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(EMBEDDED / name, directory / name)
    return directory


def make_windows(options: dict[str, Any]) -> tuple[Any, list[str]]:
    """Windows, and the text they are of: one held-out document cut to a whole number of windows."""
    from transformers import AutoTokenizer

    from gqa.corpus.stdlib import stdlib_documents
    from gqa.eval.perplexity import make_text

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    joined = "\n\n".join(document.text for document in stdlib_documents("heldout"))
    text = joined[: options["windows"] * options["context"] * 3]  # about three characters a token
    return make_text([text], tokenizer, protocol="rolling", context=options["context"]), [text]


def bare_forward(model: Any, options: dict[str, Any]) -> Callable[[], float]:
    import torch

    from gqa.corpus.windows import batches

    text, _ = make_windows(options)

    @torch.inference_mode()
    def run() -> float:
        for indices in batches(text.windows, options["batch_size"]):
            longest = max(len(text.windows[i].ids) for i in indices)
            rows = [[*text.windows[i].ids, *[0] * longest][: longest - 1] for i in indices]
            model(input_ids=torch.tensor(rows), use_cache=False)
        return float("nan")

    return run


def ours(model: Any, options: dict[str, Any]) -> Callable[[], float]:
    from gqa.corpus.likelihood import ChunkedHead
    from gqa.eval.scoring import score

    text, _ = make_windows(options)

    def run() -> float:
        return score(ChunkedHead(model), text.windows, batch_size=options["batch_size"]).total_nats

    return run


def harness(model: Any, options: dict[str, Any], batch_size: int | None = None) -> Callable[[], float]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    _, texts = make_windows(options)
    size = batch_size or options["batch_size"]
    evaluator = HFLM(pretrained=model, tokenizer=tokenizer, max_length=options["context"], batch_size=size)

    def run() -> float:
        requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
        return -sum(evaluator.loglikelihood_rolling(requests, disable_tqdm=True))

    return run


def harness_default(model: Any, options: dict[str, Any]) -> Callable[[], float]:
    return harness(model, options, batch_size=1)  # what lm_eval takes when no --batch_size is given


CONTESTANTS = {
    "bare forward": bare_forward, "gqa-eval": ours, "lm_eval, same batch": harness, "lm_eval, default": harness_default
}  # fmt: skip


def _status(process: int | str, key: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _child(name: str, options: dict[str, Any], pipe: Connection) -> None:
    os.environ["TQDM_DISABLE"] = "1"  # lm_eval has a bar for every batch
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"])).eval()
    run = CONTESTANTS[name](model, options)
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set counts from here
    before, start = _status("self", "VmRSS"), time.perf_counter()
    nats = run()
    pipe.send((time.perf_counter() - start, _status("self", "VmHWM") - before, nats))


def measure(name: str, options: dict[str, Any]) -> tuple[float, int, float]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_child, args=(name, options, theirs))
    process.start()
    theirs.close()
    found: tuple[float, int, float] = pipe.recv()
    process.join()
    return found


def compare(options: dict[str, Any], repeats: int) -> dict[str, Any]:
    runs: dict[str, list[tuple[float, int, float]]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            runs[name].append(measure(name, options))
            print(f"  round {repeat + 1}  {name:22}{runs[name][-1][0]:8.2f} s", flush=True)
    text, _ = make_windows(options)
    rows = {
        name: {
            "seconds": statistics.median(run[0] for run in found),
            "fastest": min(run[0] for run in found),
            "slowest": max(run[0] for run in found),
            "memory_bytes": statistics.median(run[1] for run in found),
            "nats": found[0][2],
        }
        for name, found in runs.items()
    }
    return {"options": options, "tokens": text.tokens, "windows": len(text.windows), "runs": rows}


def report(figures: dict[str, Any]) -> None:
    rows = figures["runs"]
    bare, own = rows["bare forward"], rows["gqa-eval"]
    print(f"\n{figures['tokens']:,} tokens in {figures['windows']} windows, {figures['options']['dtype']}")
    print(f"{'':22}{'median':>10}{'min - max':>18}{'of bare':>10}{'tokens/s':>10}{'memory':>12}{'nats':>14}")
    for name, row in rows.items():
        nats = "" if row["nats"] != row["nats"] else f"{row['nats']:,.2f}"
        print(
            f"{name:22}{row['seconds']:8.2f} s{row['fastest']:9.2f} - {row['slowest']:6.2f}"
            f"{row['seconds'] / bare['seconds']:10.3f}{figures['tokens'] / row['seconds']:10,.0f}"
            f"{row['memory_bytes'] / MIB:8,.0f} MiB{nats:>14}"
        )
    same, default = rows["lm_eval, same batch"], rows["lm_eval, default"]
    print(f"""
over a bare forward pass    {own["seconds"] / bare["seconds"] - 1:+.1%} (at most +5 % asked)
lm_eval, equal batch size   {same["seconds"] / own["seconds"]:.2f} x our time (at least 1.0 asked)
lm_eval, default            {default["seconds"] / own["seconds"]:.2f} x our time (at least 1.2 asked)
peak memory                 {own["memory_bytes"] / same["memory_bytes"]:.2f} of lm_eval's (below 1 asked)
nats agree to               {abs(own["nats"] / same["nats"] - 1):.1e}""")


@click.command(help=__doc__.splitlines()[0], context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True), help="A checkpoint.  [default: a random one]")
@click.option("--windows", type=int, default=16, help="Windows to score.")
@click.option("--context", type=int, default=512)
@click.option("--batch-size", type=int, default=8)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--threads", type=int, default=2)
@click.option("--repeats", type=int, default=3)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(repeats: int, json_file: Path | None, **options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        options["model"] = str(options["model"] or write_model(Path(scratch)))
        figures = compare(options, repeats)
    report(figures)
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
