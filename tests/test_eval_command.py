"""`gqa-eval` as its user meets it: the output, every option that has no test of its own, refusals
in one line.
"""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from support.checkpoints import edit_json, edit_tensors, run
from support.documents import lines
from support.embedded import SOURCE, copy_source
from support.evaluations import (
    evaluate_models,
    few_questions,
    model_directory,
    refused,
    results,
    words,
)
from support.hub_server import Hub, Machine
from support.patches import use_data_cache, use_data_hub
from support.training import Runs

from gqa.core import console
from gqa.core.devices import fast_dtype
from gqa.core.errors import RefusedError
from gqa.eval import decode, evaluate, subjects
from gqa.eval.subjects import Subject
from gqa.models.loading import load_model

ROOT = Path(__file__).parents[1]
LOAD = Subject.load


def test_the_tables() -> None:
    verdicts, quality, memory = (
        part.splitlines() for part in evaluate_models("SRC G4 G2 --data TEXT").out.split("\n\n")
    )
    assert [line.partition(", perplexity")[0] for line in verdicts] == [
        "damaged    gqa4: 4 of 8 KV heads, KV cache 2x smaller",
        "damaged    gqa2: 2 of 8 KV heads, KV cache 4x smaller",
        "good: the interval ends at x1.05 or below, and recall falls by at most 2 points; damaged: "
        "the ratio is above x1.5, or recall falls by more than 10 points; trade-off: between them",
    ]
    assert quality[0] == f"Quality on {model_directory() / 'text.jsonl'}"
    assert [line.split()[0] for line in quality[1:5]] == ["model", "stdlib-mha", "gqa4", "gqa2"]
    perplexities = [float(line.split()[2]) for line in quality[2:5]]
    assert perplexities == sorted(perplexities)
    ratios = [float(line.split()[3]) for line in quality[3:5]]
    assert ratios == pytest.approx(
        [value / perplexities[0] for value in perplexities[1:]], rel=1e-3
    )
    dtype = str(fast_dtype("cpu")).removeprefix("torch.")
    assert re.fullmatch(
        rf"[\d,]+ tokens of 4 documents \([\d,]+ bytes\) .* in windows of 512 and less: documents "
        rf"have \d+ tokens on average; in {dtype}",
        quality[5],
    )
    assert memory[1].endswith("KV at 512")
    assert [line.split()[3:6:2] for line in memory[2:]] == [
        ["6.0", "100%"],
        ["3.0", "50%"],
        ["1.5", "25%"],
    ]


def test_lines_of_progress_name_the_model_and_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    few_questions(monkeypatch)
    # A line of the log for every batch
    monkeypatch.setattr(console, "_LOG_SECONDS", 0.0)
    line = "SRC G2 --data TEXT --recall --context 128 --tokens 200"
    done = run(*words(line), program="gqa-eval")
    done.expect()
    stages = dict.fromkeys(re.findall(r"^(.*): \S+ of \S+ tokens, ", done.err, re.MULTILINE))
    of_models = [stage for stage in stages if stage.partition(",")[0] in ("stdlib-mha", "gqa2")]
    assert of_models == [
        "stdlib-mha, recall",
        "stdlib-mha, perplexity",
        "gqa2, recall",
        "gqa2, perplexity",
    ]


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_stored_bfloat16_is_computed_in_float32_where_a_cpu_emulates_it(
    native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding aside, with the same result; what is asked for is what is computed in."""
    monkeypatch.setattr("gqa.core.devices.native_bfloat16", lambda device: native)
    line = "SRC --data TEXT --context 64 --tokens 100"
    by_default = results(line)["models"][0]
    as_stored = results(f"{line} --precision bfloat16")["models"][0]
    assert (by_default["dtype"], as_stored["dtype"]) == (dtype, "bfloat16")
    assert by_default["quality"]["nats"] == pytest.approx(as_stored["quality"]["nats"], rel=1e-3)


def test_one_model_and_the_options_of_its_text() -> None:
    """Nothing is compared with it; quiet shows the same. A separator cuts the document."""
    line = (
        "SRC --data PLACE/text.txt --context 64 --tokens 100 --decode --decode-contexts 4 "
        "--decode-steps 1"
    )
    shown = evaluate_models(line).out
    assert "100 tokens of 1 document (" in shown
    assert "in windows of 64; in" in shown, "the document is longer than a window"
    assert "KV at 64" in shown
    assert "384.0 KiB" in shown  # 64 tokens of 6 KiB
    assert not re.search("baseline|cache left|speedup", shown)
    assert [table.splitlines()[0] for table in evaluate_models(f"{line} -q").out.split("\n\n")] == [
        table.splitlines()[0] for table in shown.split("\n\n")
    ]
    assert (
        results("SRC --data PLACE/text.txt --context 64 --separator return")["text"]["documents"]
        > 1
    )


def test_memory() -> None:
    """What fits of 512 tokens: 6 layers of 32 numbers a key or a value, in 2 bytes each."""
    result = run(*words("SRC G2 --memory 80GB --json"), program="gqa-eval")
    assert "fit into 74.5 GiB with the weights (act" in result.err
    for model, heads in zip(json.loads(result.out)["models"], (8, 2), strict=True):
        free, token = 80 * 10**9 - model["weight_bytes"], 2 * 6 * heads * 32 * 2
        assert model["kv_cache"]["fits"] == {"batch": free // (512 * token)}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[Any]]]:
    """Of each model that is loaded: how many are in memory before, and the devices that have its
    layers.
    """
    models, noted = list[Any](), list[tuple[int, set[Any]]]()

    def load(subject: Subject, *args: Any) -> Any:
        alive, model = sum(reference() is not None for reference in models), LOAD(subject, *args)
        models.append(weakref.ref(model))
        noted.append((alive, set(getattr(model, "hf_device_map", {"": None}).values())))
        return model

    # Which models are in memory at a time, and where, is in no report
    monkeypatch.setattr(Subject, "load", load)
    return noted


def test_one_model_is_in_memory_at_a_time(loads: list[tuple[int, set[Any]]]) -> None:
    """But to be timed all are loaded at once, and with --kl one beside the baseline."""
    results(
        "SRC G4 G2 --data TEXT --context 64 --tokens 100 --decode --decode-contexts 8 "
        "--decode-steps 1"
    )
    results("SRC G4 G2 --data TEXT --context 64 --tokens 100 --kl")
    assert [alive for alive, _ in loads] == [0, 1, 2, 0, 0, 0, 0, 1, 1]


def test_a_model_larger_than_memory(
    loads: list[tuple[int, set[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that memory does not hold are read from the disk, with the same scores;
    decoding too.
    """
    line = (
        "SRC G2 --data TEXT --context 128 --tokens 200 --precision float32 --kl --decode "
        "--decode-contexts 8 "
    )
    line += "--decode-steps 1 --decode-batches 2"
    whole = results(line)
    # A machine with little memory: parts of the models go to the disk
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 12_000_000})
    spread = results(f"{line} --device auto")
    assert [devices for _, devices in loads] == [{None}] * 4 + [{"cpu", "disk"}] * 4
    for ours, theirs in zip(spread["models"], whole["models"], strict=True):
        assert ours["quality"]["nats"] == pytest.approx(theirs["quality"]["nats"], rel=1e-6)
        assert len(ours["decode"]["points"]) == len(theirs["decode"]["points"]) == 1
    kl = [result["models"][1]["against_baseline"]["kl"]["mean"] for result in (spread, whole)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-5)
    # A machine where not even the embedding fits
    monkeypatch.setattr("accelerate.utils.get_max_memory", lambda: {"cpu": 1000})
    assert "the embedding of" in refused("SRC --data TEXT --device auto")
    two = SimpleNamespace(num_processes=2, is_main_process=True)
    # As under a launcher of two processes
    monkeypatch.setattr(subjects, "ranks", lambda: two)
    assert "--device auto works with one process only, but there are 2" in refused(
        "SRC --data TEXT --device auto"
    )


def test_ranks_print_one_result(runs: Runs) -> None:
    """Nor does anything that they print depend on how many shared the work."""
    line = words("SRC G2 --data TEXT --context 64 --tokens 500 --precision float32 --kl")
    assert runs.finish(*line, ranks=2, program="eval").out == run(*line, program="gqa-eval").out


def test_hub_ids(
    tmp_path: Path, hub: Hub, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models, and of a data set, whose test split is the default."""
    use_data_hub(monkeypatch, hub.endpoint)
    use_data_cache(monkeypatch, tmp_path / "cache")
    (data := tmp_path / "data").mkdir()
    lines(data / "train.jsonl", {"text": "import os\n" * 99, "other": ""})
    (data / "test.jsonl").write_bytes((model_directory() / "text.jsonl").read_bytes())
    hub.repo("lab/data", data)
    hub.repo("lab/mha", SOURCE)
    commit = hub.repo("lab/gqa", model_directory() / "gqa2").refs["main"]
    line = words("lab/mha lab/gqa --data lab/data --context 64 --json -q --revision main")
    result = machine.run(*line, program="gqa-eval")
    result.expect(err="")
    models = json.loads(result.out)["models"]
    assert [model["name"] for model in models] == ["lab/mha", "lab/gqa"]
    assert models[1]["revision"] == commit
    local = results("SRC G2 --data TEXT --context 64")["models"]
    assert [model["quality"] for model in models] == [model["quality"] for model in local]


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "SRC G2",
            "nothing to measure; pass text with --data, or pass --recall, --decode or --memory",
        ),
        ("SRC ./nothing", "'./nothing'; pass a directory with config.json, or a model id"),
        ("SRC G2 --kl --memory 1GB", "--kl has no effect without --data"),
        (
            "SRC --simulate-cache 8",
            "--simulate-cache has no effect without --data, --recall or --memory; pass one of them "
            "too",
        ),
        (
            "SRC G2 --data TEXT --json out.json",
            "--json takes no file name, but 'out.json' was passed; to write the results there, end "
            "the command with > out.json",
        ),
        ("SRC G2 --data TEXT --decode-steps 3", "--decode-steps has no effect without --decode"),
        (
            "SRC --data TEXT --kl",
            "--kl compares checkpoints, but only one was passed; pass a second one, or "
            "--simulate-cache",
        ),
        ("SRC --data PLACE/short.txt", "the text has 4 tokens, less than one window of 512"),
        (
            "SRC --data PLACE/short.txt --tokens 100",
            "the text has 4 tokens, less than --tokens 100; pass more text, or a smaller --tokens",
        ),
        ("SRC --data TEXT --revision main", "--revision is for model ids"),
        (
            "SRC --decode --context 64",
            "--context has no effect without --data, --recall or --memory; pass one",
        ),
        (
            "SRC --memory 1GB --device cpu",
            "--device has no effect without --data, --recall or --decode",
        ),
        (
            "SRC --decode --decode-contexts 500",
            "500 tokens and 32 steps are more than the 512 positions of stdlib-mha",
        ),
        # Nowhere, whatever GPUs there are
        ("SRC --data TEXT --device cuda:99", "device cuda:99 cannot be used: "),
        ("SRC --data TEXT --device gpu", "there is no device gpu; pass cpu, cuda, cuda:1 or mps"),
        (
            "T5 --data TEXT",
            "t5gemma is an encoder-decoder, so it needs pairs; name the column of targets with "
            "--target-column",
        ),
        (
            "SRC --data TEXT --target-column other",
            "--target-column works only with encoder-decoders, but stdlib-mha is not one",
        ),
        ("T5 --data TEXT --target-column text", "are the same column; pass two"),
        (
            "SRC --data PLACE/text.txt --text-column body",
            "text.txt has no columns; remove --text-column",
        ),
        ("SRC --data TEXT --separator x", "--separator splits text files into documents, but "),
        (
            "SRC T5 --recall",
            "one of stdlib-mha and t5gemma is an encoder-decoder and the other is not, so their "
            "losses per token are not comparable",
        ),
        ("T5 --recall", "--recall works only with decoders, but t5gemma is an encoder-decoder"),
        (
            "T5 --data TEXT --target-column none",
            "has no column 'none'; it has 'other', 'text'; name the column of targets with "
            "--target-column",
        ),
        (
            "T5 --data TEXT --target-column other --simulate-cache 4",
            "--simulate-cache works only with decoders that have KV heads",
        ),
        (
            "SRC --data TEXT --simulate-cache 4 --decode",
            "--simulate-cache and --decode cannot be combined",
        ),
        ("SRC --data TEXT --context 600", "--context 600 is more than the 512 positions"),
        (
            "T5 SRC --data TEXT --target-column other",
            "one of t5gemma and stdlib-mha is an encoder-decoder and the other is not",
        ),
    ],
)
def test_refusals(line: str, message: str) -> None:
    (model_directory() / "short.txt").write_text("import os\n")
    assert message in refused(line)


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_models_that_predict_no_tokens(tmp_path: Path, name: str) -> None:
    """A base class, a classifier: also where it is only compared with.

    What needs no prediction is measured.
    """
    path = copy_source(tmp_path, "headless")
    edit_json(path / "config.json", lambda config: config.update(architectures=[name]))
    for line in (f"{path} --data TEXT", f"SRC {path} --decode", f"SRC {path} --recall"):
        assert f"headless is a {name}, which does not predict the next token" in refused(line)
    assert "KV/token" in evaluate_models(f"{path} --memory 1GB -o {tmp_path / 'report'}").out


EMBEDDING = "model.embed_tokens.weight"
KEY, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight"


def damaged(path: Path, damage: str) -> Path:
    """A copy of a checkpoint with one thing wrong."""
    changes: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        "missing": lambda weights: weights.pop(KEY),
        "unexpected": lambda weights: weights.update(
            {KEY.replace("k_proj", "extra"): torch.zeros(3)}
        ),
        "mismatched": lambda weights: weights.update({KEY: weights[KEY][:128].contiguous()}),
        "nan": lambda weights: weights[UP][5].fill_(math.nan),
        "vocabulary": lambda weights: weights.update(
            {EMBEDDING: weights[EMBEDDING][:3000].clone()}
        ),
    }
    if damage in changes:
        edit_tensors(path, changes[damage])
    if damage == "vocabulary":
        edit_json(path / "config.json", lambda config: config.update(vocab_size=3000))
    elif damage == "tokenizer":
        (path / "tokenizer.json").write_text("{")
    elif damage == "other tokenizer":
        edit_json(
            path / "tokenizer.json",
            lambda all: all["model"]["vocab"].update({"▁import": 621, "▁return": 620}),
        )
    return path


@pytest.mark.parametrize(
    ("damage", "line", "message"),
    [
        (
            "missing",
            "SRC BAD --data TEXT",
            "do not fit its config.json (missing keys: model.layers.1.self_attn.k_proj.weight",
        ),
        (
            "unexpected",
            "SRC BAD --data TEXT",
            "unexpected keys: model.layers.1.self_attn.extra.weight",
        ),
        (
            "mismatched",
            "SRC BAD --data TEXT",
            "mismatched keys: ('model.layers.1.self_attn.k_proj.weight', ",
        ),
        (
            "nan",
            "SRC BAD --data TEXT --precision bfloat16",
            "bad predicts NaN or infinite logits; pass --precision float32; if that does not help, "
            "check its weights, or download it again",
        ),
        (
            "nan",
            "SRC BAD --data TEXT --precision float32",
            "bad predicts NaN or infinite logits; check its weights, or download it again\n",
        ),
        ("nan", "SRC BAD --data TEXT --kl", "bad predicts NaN or infinite logits"),
        ("nan", "BAD SRC --data TEXT --kl", "bad predicts NaN or infinite logits"),
        (
            "vocabulary",
            "SRC BAD --data TEXT",
            "the embedding of bad has only 3,000 of the 4,096 tokens of its tokenizer",
        ),
        ("vocabulary", "BAD --data TEXT", "has 3000 rows: they do not belong together"),
        ("tokenizer", "SRC BAD --data TEXT", "transformers cannot load the tokenizer of bad"),
        ("other tokenizer", "SRC BAD --data TEXT", "stdlib-mha and bad have different tokenizers"),
    ],
)
def test_bad_checkpoints(tmp_path: Path, damage: str, line: str, message: str) -> None:
    bad = damaged(copy_source(tmp_path, "bad"), damage)
    assert message in refused(
        line.replace("BAD", str(bad)), "--no-recall", "-o", tmp_path / "report", "--context", 64
    )
    assert not (tmp_path / "report").exists()


def test_an_adapter_beside_weights(tmp_path: Path) -> None:
    """It may be merged into them already: no function loads such a directory."""
    bad = copy_source(tmp_path, "bad")
    (bad / "adapter_config.json").write_text("{}")
    assert "bad has an adapter next to its weights (adapter_config.json)" in refused(
        f"SRC {bad} --data TEXT"
    )
    for weights in (True, False):
        with pytest.raises(
            RefusedError, match="remove the adapter's files if it is merged already"
        ):
            load_model(str(bad), weights=weights)


def test_transformers_prints_nothing_while_it_loads(tmp_path: Path, caplog: Any) -> None:
    """Tables of keys: the error is one line, whatever level of messages is set."""
    logger, level = logging.getLogger("transformers"), transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_info()
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(RefusedError, match=r"do not fit its config.json \(missing keys: "):
            load_model(str(damaged(copy_source(tmp_path, "bad"), "missing")))
        assert transformers.utils.logging.get_verbosity() == logging.INFO
    finally:
        logger.removeHandler(caplog.handler)
        transformers.utils.logging.set_verbosity(level)
    assert caplog.records == []


def test_a_base_model_that_is_not_first_gives_a_warning() -> None:
    """What is compared with its own conversion is measured nevertheless."""
    options = "--data TEXT --tokens 64 --context 32 -q"
    done = run(*words(f"G2 {SOURCE} {options}"), program="gqa-eval")
    done.expect(
        err=(
            "warning: stdlib-mha is the base model of gqa2, and is compared with it as if it "
            "were the converted model; pass the base model stdlib-mha first\n"
        )
    )
    in_words = run(*words(f"G2 {SOURCE} --data TEXT --tokens 64 --context 32"), program="gqa-eval")
    assert "2 -> 8 KV heads, KV cache 4x larger" in in_words.out
    assert "good" not in in_words.out
    in_order = run(*words(f"{SOURCE} G2 {options}"), program="gqa-eval")
    in_order.expect(err="")


def test_a_model_of_another_shape_gives_a_warning(small: Path) -> None:
    done = run(*words(f"{SOURCE} {small} --memory 1GiB -q"), program="gqa-eval")
    done.expect(
        err=(
            "warning: model has 2 layers of width 32, stdlib-mha 6 layers of width 256: it is "
            "another model, not a conversion of it\n"
        )
    )


def test_a_model_that_is_compared_with_itself_gives_a_warning() -> None:
    itself = run(*words(f"{SOURCE} {SOURCE} --memory 1GiB -q"), program="gqa-eval")
    itself.expect(
        err="warning: stdlib-mha is the same model as stdlib-mha: their quality cannot differ\n"
    )
    with_int8 = run(*words(f"{SOURCE} --simulate-cache 8 --memory 1GiB -q"), program="gqa-eval")
    with_int8.expect(err="")


def test_a_batch_of_none_is_explained() -> None:
    options = "--context 512 -q --memory"
    note = "; 0: not even one fits"
    too_little = run(*words(f"{SOURCE} G2 {options} 12MiB"), program="gqa-eval")
    assert note in too_little.out
    enough = run(*words(f"{SOURCE} G2 {options} 64MiB"), program="gqa-eval")
    assert note not in enough.out


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ctrl-C while the first model is scored
    monkeypatch.setattr(evaluate, "score", lambda *args, **more: signal.raise_signal(signal.SIGINT))
    result = run(*words("SRC --data TEXT"), "-o", tmp_path / "report", program="gqa-eval")
    result.expect(130, out="")
    assert result.err.strip() == "gqa-eval: interrupted; no report was written"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", ["", "--kl", "--json"])
def test_an_interruption_prints_what_was_measured_before(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ctrl-C while the third model is loaded
    loaded = list[str]()

    def load(subject: Subject, *args: Any) -> Any:
        loaded.append(subject.name)
        if len(loaded) == 3:
            signal.raise_signal(signal.SIGINT)
        return LOAD(subject, *args)

    command = words(f"SRC G2 G4 --data TEXT --tokens 64 --context 32 --no-recall {options}")
    whole = run(*command, program="gqa-eval")
    monkeypatch.setattr(Subject, "load", load)
    result = run(*command, "-o", tmp_path / "report", program="gqa-eval")

    result.expect(130, out="")
    row = re.search("^gqa2 .*", whole.out + whole.err, re.MULTILINE)
    assert row
    assert row[0] in result.err
    assert result.err.endswith("gqa-eval: interrupted; no report was written\n")
    assert list(tmp_path.iterdir()) == []


def test_timings_are_printed_if_there_is_too_little_memory_to_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a table of quality, of which nothing was measured."""
    # A device that is full when the first model is scored
    monkeypatch.setattr(evaluate, "score", Mock(side_effect=torch.OutOfMemoryError("full")))
    decoding = "--decode --decode-contexts 4 --decode-steps 1 --decode-batches 1"
    done = run(*words(f"SRC G2 --data TEXT --context 64 {decoding}"), program="gqa-eval")
    done.expect(2, out="", says="out of memory: full; lower --batch-size")
    assert done.err.startswith("measured so far:\n")
    table = done.err.partition("\nDecoding\n")[2].splitlines()
    assert [line.split()[0] for line in table[:3]] == ["model", "stdlib-mha", "gqa2"]
    assert "Quality on" not in done.err


@pytest.mark.parametrize("where", ["head, found to split", "head", "decoding"])
@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nlines"),
            "out of memory: CUDA out of memory. lines; lower --",
            2,
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory: DefaultCPUAllocator",
            2,
        ),
        (RuntimeError("a kernel failed"), "unexpected RuntimeError: a kernel failed", 1),
    ],
)
def test_what_fails_is_not_taken_for_another_kind_of_head(
    where: str, error: Exception, message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever memory ends or a kernel fails; in decoding before anything else is measured."""
    runs = list[int]()

    def load(*args: Any) -> Any:
        model = LOAD(*args)
        model.base_model.register_forward_hook(count)
        return model

    def count(*args: Any) -> None:
        runs.append(1)
        if len(runs) == {"head, found to split": 2, "head": 4}.get(where):
            raise error

    # The device is full at a certain place
    monkeypatch.setattr(Subject, "load", load)
    line = "SRC --data TEXT --context 64 --batch-size 3"
    if where == "decoding":
        # Decoding comes first: scoring is not begun
        monkeypatch.setattr(decode, "greedy_decode", Mock(side_effect=error))
        monkeypatch.setattr(evaluate, "score", Mock(side_effect=AssertionError))
        line += " --decode"
    result = run(*words(line), program="gqa-eval")
    result.expect(code, out="", says=message)
    if code == 2:
        lower = "lower --batch-size (now 3) or --context (now 64)\n"
        if where == "decoding":
            lower = "lower --decode-batches or --decode-contexts\n"
        assert result.err.endswith(lower)
