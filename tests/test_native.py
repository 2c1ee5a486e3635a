"""Models written for another class, against both classes of transformers: the oracles, each with a
control; what is refused, what the result says, tokenizers, and heads that are aligned.

The source class computes what is expected: its own logits at G = H, and at fewer heads those of the
source whose heads are tied in its own layout. Nothing here knows how the converter lays tensors
out: what keys and values are is said once more, in the layouts of the source classes. Differences
are relative to the range of the logits, in float32.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import edit_json, edit_tensors, refusal, run
from support.evaluations import cache_bytes
from support.families import all_tensors, decode, error, left_padded, write_checkpoint
from support.native_models import CASES
from support.scrambled import equal, on_ids, relative
from support.tiny_models import build, inputs, logits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gqa.checkpoint.hub import open_model
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.recast import targets
from gqa.convert.recast.native import NATIVE
from gqa.convert.recast.targets import checkpoint_cache

SAME = 1e-5
CONTROL = 100 * SAME


@cache
def source_model(name: str) -> PreTrainedModel:
    return build(CASES[name].tiny, 4, attention="eager")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The source by name, its layers split over shards."""

    @cache
    def make(name: str) -> Path:
        return write_checkpoint(source_model(name), tmp_path_factory.mktemp("source"))

    return make


def load(directory: Path, attention: str = "sdpa") -> PreTrainedModel:
    """As anybody would: the Auto class, no remote code; nothing missing, nothing unexpected."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation=attention, dtype=torch.float32
    )
    assert not any(info.values()), info
    assert isinstance(model, PreTrainedModel)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_identity(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """G = H: the other class gives the source's logits, also with padding on the left and token by
    token.
    """
    case, source = CASES[name], source_model(name)
    tiny = case.tiny
    result = convert_checkpoint(checkpoint(name), case.groups[0], tmp_path / "out", method="mean")
    given = inputs(tiny)
    for attention in ("eager", "sdpa"):
        target = load(result.out, attention)
        assert target.config.model_type == case.target
        assert target.config.num_key_value_heads == source.config.num_attention_heads
        assert relative(logits(tiny, target, given), logits(tiny, source, given)) < SAME
    if case.exact:
        assert torch.equal(
            logits(tiny, load(result.out, "eager"), given), logits(tiny, source, given)
        )
    padded = left_padded(given, 3)
    kept = padded["attention_mask"].bool()
    assert relative(logits(tiny, target, padded)[kept], logits(tiny, source, padded)[kept]) < SAME
    assert relative(decode(target, given), decode(source, given)) < SAME
    assert (
        relative(logits(tiny, target, given), logits(tiny, source, inputs(tiny, seed=1))) > CONTROL
    )
    cache = checkpoint_cache(open_model(str(checkpoint(name))))  # what gqa-eval says of a source
    assert cache.bytes_at(9) == sum(cache_bytes(source, 9, 1))


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    """Folding and merging are done in float32; only the result is rounded, also for another
    --dtype.
    """
    model = build(CASES["gpt_neox"].tiny, 4).half()
    half = write_checkpoint(model, tmp_path / "half")
    whole = write_checkpoint(model.float(), tmp_path / "whole")
    exact = all_tensors(convert_checkpoint(whole, 2, tmp_path / "exact", method="mean").out)
    for dtype in (None, "bfloat16", "float32"):
        rounded = all_tensors(
            convert_checkpoint(half, 2, tmp_path / str(dtype), dtype=dtype, method="mean").out
        )
        for name, tensor in exact.items():
            assert rounded[name].equal(tensor.to(getattr(torch, dtype or "float16"))), name


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2+scaled"])
def test_bin_files_and_shards_give_the_same(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A checkpoint of torch's own format, other shards: the same tensors.

    And gpt2 without a prefix.
    """
    expected = all_tensors(
        convert_checkpoint(checkpoint(name), 1, tmp_path / "expected", method="mean").out
    )
    model = source_model(name)
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {
        k.removeprefix("transformer."): v for k, v in model.state_dict().items() if k not in tied
    }
    # The mask of old checkpoints
    state |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if "gpt2" in name else {}
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    found = all_tensors(
        convert_checkpoint(tmp_path / "bin", 1, tmp_path / "out", method="mean").out
    )
    assert equal(found, expected)


def test_what_stays_is_moved_as_bytes(checkpoint: Callable[[str], Path]) -> None:
    """Embeddings and all that is only renamed are copied from their files, not read into memory."""
    plan = plan_conversion(checkpoint("gpt_neox"), 2, method="mean")
    read = {t.name for t in plan.tensors if t.change or not plan.checkpoint.has_range(t.source)}
    computed = re.compile(r"(q|k|v)_proj|fc1|input_layernorm|lm_head\.bias")
    assert read == {t.name for t in plan.tensors if computed.search(t.name)}


def source(
    place: Path,
    name: str,
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    **config: Any,
) -> Path:
    """A source whose config.json or tensors were changed."""
    directory = place / "source"
    build(CASES[name].tiny, 4).save_pretrained(directory)
    edit_tensors(directory, change)
    edit_json(directory / "config.json", lambda raw: raw.update(config))
    return directory


# Groups, or options or tensors of a source (then with one head), that no target expresses.
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "gpt2",
            2,
            r"--kv-heads 2 is not possible for the 4 KV heads .* of source \(G = 1 or H\); "
            r"pass 1$",
        ),
        ("gpt_neox", 3, "does not divide the 4 KV heads of source; pass 1 or 2"),
        (
            "gpt_neox",
            {"use_parallel_residual": False},
            "no class .* for its layers .use_parallel_residual: false",
        ),
        (
            "gpt2",
            {"activation_function": "gelu_mine"},
            "cannot build GPTBigCodeForCausalLM .*gelu_mine",
        ),
        (
            "gpt_neox",
            {"num_attention_heads": 0},
            "cannot read config.json as gpt_neox|makes no sense",
        ),
        (
            "gpt2",
            {"n_layer": 3},
            r"has no h\.2\.attn\.c_attn\.weight; pass a checkpoint of the whole model",
        ),
        ("gpt2", {"n_layer": 1}, r"h\.1\.attn.* are not part of a language model of type gpt2"),
        (
            "gpt2",
            {"n_embd": 64},
            "cannot become transformer.h.0.attn.c_attn.bias: has 96 rows where",
        ),
        ("gpt_neox", lambda t: t.pop("embed_out.weight"), "has no embed_out.weight"),
        (
            "gpt2",
            lambda t: t.update({"score.weight": torch.zeros(2, 32)}),
            "score.weight is not part of a language",
        ),
        (
            "gpt2",
            lambda t: t.update({"wte.weight": torch.zeros(96, 32)}),
            "with and without 'transformer.' before",
        ),
        (
            "gpt2",
            lambda t: t.update(
                {"transformer.h.0.mlp.c_fc.weight": torch.zeros(32, 128, dtype=torch.int8)}
            ),
            "is stored as I8: quantized or packed weights cannot be converted",
        ),
        (
            "gpt_neox",
            lambda t: t.update({"gpt_neox.layers.0.input_layernorm.weight": torch.zeros(7)}),
            "input_layernorm.weight .7. cannot become model.layers.0.self_attn.q_proj.weight; "
            "check that the weights belong to this model",
        ),
    ],
)
def test_what_no_target_expresses(
    name: str, change: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RECASTINGS", NATIVE)  # GPT-2 would get custom modeling code
    groups, options = (
        change if isinstance(change, int) else 1,
        change if isinstance(change, dict) else {},
    )
    directory = source(tmp_path, name, *([change] if callable(change) else []), **options)
    said = refusal(directory, "--kv-heads", groups, "--method", "mean")
    assert re.search(says, said), said


def test_every_entry_has_a_tiny_model() -> None:
    """An entry that nobody built is one that nobody tested."""
    built = {(case.tiny.model_type, case.target) for case in CASES.values()}
    assert {(entry.source, entry.target) for entry in NATIVE} == built


def test_the_result_says_what_it_is(tmp_path: Path) -> None:
    directory = source(tmp_path, "gpt_neox")
    (directory / "notes.txt").write_bytes(b"\x00\xff carried along")
    done = run("--kv-heads", 2, "--method", "mean", "--json", directory)
    assert "class       gpt_neox (GPTNeoXForCausalLM) -> phi (PhiForCausalLM), native" in done.err
    record, out = json.loads(done.out), tmp_path / "source-gqa2-mean"
    written = json.loads((out / "gqa_conversion.json").read_text())
    assert record["recast"] == written["recast"]
    assert written["recast"]["to"] == {"model_type": "phi", "architecture": "PhiForCausalLM"}
    assert record["parameters"]["before"] == build(CASES["gpt_neox"].tiny, 4).num_parameters()
    assert (
        "The class is `phi (PhiForCausalLM)`, a class of transformers"
        in (out / "README.md").read_text()
    )
    for name in ("generation_config.json", "notes.txt"):
        assert (out / name).read_bytes() == (directory / name).read_bytes()
    stated, before = (json.loads((path / "config.json").read_text()) for path in (out, directory))
    assert stated["architectures"] == ["PhiForCausalLM"]
    assert stated["model_type"] == "phi"
    assert [stated[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [1, 2, 0]
    assert stated["dtype"] == before["dtype"]


TEXT = "def train(model, data):\n    return  model(data)  # 3.14 <|endoftext|> naïve"
# What is stored of a tokenizer, from all that transformers writes to the two files of the oldest
# repositories.
STORED: dict[str, tuple[set[str], dict[str, Any]]] = {
    "all": (
        {"tokenizer.json"},
        {"tokenizer_class": ..., "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    "no class": ({"tokenizer.json", "vocab.json", "merges.txt"}, {"model_max_length": 64}),
    "vocabulary": ({"vocab.json", "merges.txt"}, {"tokenizer_class": ..., "model_max_length": 64}),
    "vocabulary alone": ({"vocab.json", "merges.txt"}, {}),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_tokenizers_stay_themselves(name: str, stored: str, tmp_path: Path) -> None:
    """AutoTokenizer gives the source's ids and special tokens, also where only the model type told
    its class.
    """
    directory, (files, settings) = source(tmp_path, name), STORED[stored]
    trained: Any = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    trained.train_from_iterator([TEXT], how)
    trained.save(str(directory / "tokenizer.json"))
    trained.model.save(str(directory))
    for file in {"tokenizer.json", "vocab.json", "merges.txt"} - files:
        (directory / file).unlink()
    if settings:
        of_type = "GPTNeoXTokenizer" if name == "gpt_neox" else "GPT2Tokenizer"
        stated = {key: of_type if value is ... else value for key, value in settings.items()}
        (directory / "tokenizer_config.json").write_text(json.dumps(stated))
    before = AutoTokenizer.from_pretrained(directory)
    out = convert_checkpoint(directory, 1, tmp_path / "out", method="mean").out
    after = AutoTokenizer.from_pretrained(out)
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert after.decode(after(TEXT)["input_ids"]) == TEXT
    assert after.special_tokens_map == before.special_tokens_map
    assert after.eos_token_id == 0
    assert after.model_max_length == before.model_max_length
    if name != "gpt2":
        assert type(after) is type(before)
    assert all((out / file).read_bytes() == (directory / file).read_bytes() for file in files)


def test_a_tokenizer_in_python_stays_itself(tmp_path: Path) -> None:
    """It has no tokenizer.json to write, which BigCode's class needs: custom code keeps it."""
    directory = source(tmp_path, "gpt2")
    (directory / "vocab.json").write_text('{"<unk>": 0, "a</w>": 1, "b</w>": 2}')
    (directory / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    out = convert_checkpoint(directory, 1, tmp_path / "out", method="mean").out
    before, after = map(AutoTokenizer.from_pretrained, (directory, out))
    assert type(after) is type(before)
    assert after("a b c")["input_ids"] == before("a b c")["input_ids"]


def test_refused(tmp_path: Path) -> None:
    """A broken tokenizer, which would be another with the result's model type; a classifier, by its
    head.
    """
    directory = source(tmp_path, "gpt2")
    edit_json(
        directory / "config.json",
        lambda raw: raw.update(architectures=["GPT2ForSequenceClassification"]),
    )
    said = refusal(directory, "--kv-heads", 2, "--method", "mean")
    assert "GPT2ForSequenceClassification does not predict tokens, and only models that do" in said
    (directory / "tokenizer.json").write_text("{}")
    assert "transformers cannot load the tokenizer of source" in refusal(directory, "--kv-heads", 1)


# Of each option that changes what is merged the mean; the others differ in the config alone, which
# identity shows.
ALIKE = (
    *((name, groups, "mean") for name in ("gpt_neox", "gpt_neox+plain") for groups in (2, 1)),
    ("gpt2", 1, "mean"),
    ("gpt2+scaled", 1, "mean"),
    ("gpt_neox", 2, "aligned"),
    ("gpt_neox", 2, "calibrated"),
    ("gpt2", 1, "calibrated"),
)


@pytest.mark.parametrize(("name", "groups", "method"), ALIKE)
def test_heads_are_merged_as_in_the_other_class(
    name: str, groups: int, method: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """As those of the checkpoint that it becomes with all its heads, which test_identity compares
    with the source; and test_families expands the target's merged heads back.
    """
    directory = checkpoint(name)
    whole = convert_checkpoint(directory, 4, tmp_path / "whole").out
    made, expected, other = (
        all_tensors(
            convert_checkpoint(place, groups, tmp_path / out, method=how, maps_options=on_ids()).out
        )
        for place, out, how in (
            (directory, "made", method),
            (whole, "expected", method),
            (whole, "other", "first"),
        )
    )
    assert made.keys() == expected.keys()
    compared = [key for key in made if method == "mean" or "bias" not in key]
    assert max(error(made[key], expected[key]) for key in compared) < 1e-4
    assert max(error(other[key], expected[key]) for key in compared) > 0.1
