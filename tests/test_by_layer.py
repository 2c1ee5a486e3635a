"""Layers with different numbers of key/value heads: the class that loads them, and who gets how
many.

The oracle is transformers' own class with every merged head repeated: uniform conversions, which
other tests hold against it, give each layer's heads, and all of them in one model must compute what
the converted one does.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import check_refused, contents, edit_json, llama, load, refusal, run
from support.families import error, write_checkpoint
from support.patches import forbid
from support.tiny_models import QUERY_HEADS, TINY, build
from support.training import options_for, tiny_checkpoint, trained
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint
from gqa.convert.merge.budget import allotted
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.convert.merge.options import MapsOptions, Refinement
from gqa.eval.subjects import Subject
from gqa.models import modeling
from gqa.models.custom_code import BY_LAYER
from gqa.models.loading import cache_name, load_model

TOLERANCE = 1e-5
HEADS = (1, QUERY_HEADS)  # of the two layers
IDS = torch.arange(10, 22)[None] % 90


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny random model."""
    return write_checkpoint(
        build(TINY[request.param], QUERY_HEADS), tmp_path_factory.mktemp(request.param) / "model"
    )


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    """With other heads in each layer."""
    return convert_checkpoint(source, HEADS, source.with_name("by-layer"), method="mean").out


families = pytest.mark.parametrize("source", BY_LAYER, indirect=True, ids=str)
one_family = pytest.mark.parametrize("source", ["llama"], indirect=True, ids=str)


def in_the_class_of_transformers(
    source: Path, heads: tuple[int, ...], place: Path
) -> PreTrainedModel:
    """The merged heads of every layer repeated to all, in the class of the source."""
    parts = {QUERY_HEADS: load(source)}
    for count in {*heads} - parts.keys():
        merged = convert_checkpoint(source, count, place / f"{count}", method="mean").out
        parts[count] = load(convert_checkpoint(merged, QUERY_HEADS, place / f"{count}-all").out)
    tensors = {}
    for name, tensor in load(source).items():
        layer = name.partition("layers.")[2].partition(".")[0]
        tensors[name] = parts[heads[int(layer)]][name] if layer else tensor
    (place / "whole").mkdir()
    save_file(tensors, place / "whole/model.safetensors", {"format": "pt"})
    (place / "whole/config.json").write_bytes((source / "config.json").read_bytes())
    return load_model(str(place / "whole"), dtype="float32")


def predicted(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@families
def test_transformers_loads_it_and_computes_the_same(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    """By the file beside the weights; layers with each other's numbers, as a control, do not
    compute it.
    """
    expected = predicted(in_the_class_of_transformers(source, HEADS, tmp_path))
    for attention in TINY[json.loads((source / "config.json").read_text())["model_type"]].attention:
        found, told = AutoModelForCausalLM.from_pretrained(
            converted,
            trust_remote_code=True,
            dtype="float32",
            attn_implementation=attention,
            output_loading_info=True,
        )
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        assert error(predicted(found), expected) < TOLERANCE
    assert (
        "`config.per_layer_config[i].num_key_value_heads` is the number"
        in (converted / "README.md").read_text()
    )
    assert (
        tuple(found.config.per_layer_config[i].num_key_value_heads for i in range(len(HEADS)))
        == HEADS
    )
    other = convert_checkpoint(source, HEADS[::-1], tmp_path / "other", method="mean").out
    assert error(predicted(load_model(str(other), dtype="float32")), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("source", ["llama", "gemma2", "cohere2", "phi3"], indirect=True, ids=str)
def test_what_is_written_is_what_it_generates_with(converted: Path) -> None:
    """The cache holds each layer's heads, and a token after another is what all at once are."""
    model = load_model(str(converted), dtype="float32")
    with torch.no_grad():
        whole = model(input_ids=IDS).logits
        first = model(input_ids=IDS[:, :8], use_cache=True)
        rest = model(input_ids=IDS[:, 8:], **{cache_name(model): first[cache_name(model)]}).logits
    assert [layer.keys.shape[1] for layer in first[cache_name(model)].layers] == list(HEADS)
    assert error(rest, whole[:, 8:]) < TOLERANCE
    greedy = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert greedy[:, : IDS.shape[1]].equal(IDS)
    # Sized by the config
    fixed = model.generate(IDS, max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert fixed.equal(greedy)


@one_family
def test_it_is_saved_and_loaded_again(converted: Path, tmp_path: Path) -> None:
    """By the code beside it alone: transformers' own class would build layers that are all
    alike.
    """
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=False)
    model = load_model(str(converted), dtype="float32")
    assert model.config.to_dict()["per_layer_config"] == {"0": {"num_key_value_heads": 1}}
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert predicted(again).equal(predicted(model))
    assert as_engines_read_it(tmp_path / "again") == list(HEADS)


def as_engines_read_it(place: Path) -> list[int]:
    """The heads of each layer as vLLM and llama.cpp's converter take them (docs/models.md), who
    must agree.
    """
    raw = json.loads((place / "config.json").read_text())
    assert raw["architectures"] == ["DeciLMForCausalLM"]
    # What is sized once fits all
    assert raw["num_key_value_heads"] == max(raw["num_key_value_heads_per_layer"])
    config = AutoConfig.from_pretrained(place, trust_remote_code=True)
    assert {block.ffn.intermediate_size for block in config.block_configs} == {
        raw["intermediate_size"]
    }
    found = [
        config.num_attention_heads // block.attention.n_heads_in_group
        for block in config.block_configs
    ]
    assert found == raw["num_key_value_heads_per_layer"]
    return found


@one_family
def test_engines_are_told_what_is_stored(source: Path, tmp_path: Path) -> None:
    """The oracle is the shape of the keys.

    One number for all layers is an ordinary Llama, as are other models none.
    """
    edit_json(
        source / "config.json", lambda raw: {key: raw[key] for key in raw if key != "rms_norm_eps"}
    )
    for heads in (HEADS, HEADS[::-1]):
        out = convert_checkpoint(source, heads, tmp_path / f"{heads[0]}", method="mean").out
        tensors = load(out)
        dim = len(tensors["model.layers.0.self_attn.q_proj.weight"]) // QUERY_HEADS
        stored = [
            len(tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]) // dim
            for layer in range(2)
        ]
        assert as_engines_read_it(out) == stored == list(heads)
        assert (
            json.loads((out / "config.json").read_text())["rms_norm_eps"]
            == LlamaConfig().rms_norm_eps
        )
    half = convert_checkpoint(source, (2, 4), tmp_path / "half", method="mean").out
    assert as_engines_read_it(
        convert_checkpoint(half, 2, tmp_path / "less", method="mean").out
    ) == [1, 2]
    qwen = write_checkpoint(build(TINY["qwen2"], QUERY_HEADS), tmp_path / "qwen")
    for model, groups, name in (
        (source, 2, "LlamaForCausalLM"),
        (qwen, HEADS, "GQAQwen2ForCausalLM"),
    ):
        out = convert_checkpoint(model, groups, tmp_path / name, method="mean").out
        raw = json.loads((out / "config.json").read_text())
        assert raw["architectures"] == [name]
        assert "num_key_value_heads_per_layer" not in raw


@pytest.mark.usefixtures("alone")
def test_it_is_trained_and_measured_as_any_other(tmp_path: Path) -> None:
    """The layers keep their numbers; gqa-eval counts the bytes that they take."""
    model = tiny_checkpoint(tmp_path / "model", "llama", kv_heads=QUERY_HEADS)
    out = convert_checkpoint(model, HEADS, tmp_path / "out", method="mean").out
    trained(options_for(out, tmp_path / "trained", teacher="none"))
    before, after = load(out), load(tmp_path / "trained")
    assert {name: tensor.shape for name, tensor in before.items()} == {
        n: t.shape for n, t in after.items()
    }
    assert any(not tensor.equal(after[name]) for name, tensor in before.items())
    files = [
        place / "modeling_gqa_by_layer.py"
        for place in (tmp_path / "trained", out, Path(modeling.__path__[0]))
    ]
    assert len({file.read_bytes() for file in files}) == 1
    assert as_engines_read_it(tmp_path / "trained") == list(HEADS)
    base, converted = (
        Subject(place.name, str(place), read_checkpoint(place))
        for place in (model, tmp_path / "trained")
    )
    assert converted.record(64)["heads"] == {"query": QUERY_HEADS, "kv": 2.5}
    share = sum(HEADS) / (2 * QUERY_HEADS)
    each = [one.record(64)["kv_cache"]["bytes_per_token"] for one in (base, converted)]
    assert each[1] == share * each[0]


@one_family
@pytest.mark.parametrize("method", ["aligned", "refined"])
def test_a_layer_that_keeps_its_heads_stays(source: Path, method: str, tmp_path: Path) -> None:
    """Byte for byte; the first layer is aligned as if all were converted: nothing came before it.

    The same number everywhere is one number, without custom modeling code.
    """
    text = CalibrationText(tokens=512, length=16)
    how = MapsOptions(
        text=text, refinement=Refinement(steps=2, blocks_per_step=4, autocast=False), device="cpu"
    )
    one = convert_checkpoint(source, 2, tmp_path / "one", method=method, maps_options=how).out
    two = convert_checkpoint(source, (2, 2), tmp_path / "two", method=method, maps_options=how).out
    assert contents(one) == contents(two)
    some = load(
        convert_checkpoint(source, HEADS, tmp_path / "some", method=method, maps_options=how).out
    )
    every = load(
        convert_checkpoint(source, 1, tmp_path / "every", method=method, maps_options=how).out
    )
    before = load(source)
    second = [name for name in before if "layers.1." in name]
    assert second
    assert all(some[name].equal(before[name]) for name in second)
    first = [name for name in before if "layers.0.self_attn" in name]
    assert all(some[name].equal(every[name]) for name in first)
    assert not all(some[name].equal(before[name]) for name in first)


# -------------------------------------------------------------------------------- who gets how many


@pytest.mark.parametrize("seed", range(6))
def test_allotted_is_the_best_of_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    losses = [
        {8: 0.0} | {kept: draw.random() for kept in draw.sample((1, 2, 4), 2)} for _ in range(4)
    ]
    budget = draw.randint(sum(map(min, losses)), 32)
    every = itertools.product(*losses)

    def lost(heads: tuple[int, ...]) -> float:
        return sum(layer[kept] for layer, kept in zip(losses, heads, strict=True))

    found = allotted(losses, budget)
    assert sum(found) <= budget
    assert lost(found) == pytest.approx(min(lost(heads) for heads in every if sum(heads) <= budget))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in whose layers 0 and 2 all key/value heads are equal: they merge without loss."""
    tiny = TINY["llama"]
    model = build(replace(tiny, options={**tiny.options, "num_hidden_layers": 4}), QUERY_HEADS)
    for layer in (model.model.layers[number] for number in (0, 2)):
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            first = projection.weight.data.chunk(QUERY_HEADS)[0]
            projection.weight.data.copy_(first.repeat(QUERY_HEADS, 1))
    return write_checkpoint(model, tmp_path_factory.mktemp("uneven") / "model")


def test_the_command_leaves_the_share_that_was_asked_for(uneven: Path, tmp_path: Path) -> None:
    """And says what it took; --kv-heads with those numbers gives the same bytes."""
    words = ("--method", "calibrated", "--tokens", 512, "--context", 16, "--json")
    made = run(uneven, "--kv-budget", 0.625, *words, "-o", tmp_path / "budget")
    told = json.loads(made.out)
    assert told["heads"]["kv_after"] == told["allotment"]["heads"] == [1, 4, 1, 4]
    nats = told["allotment"]["nats"]
    assert max(nats[0]["1"], nats[2]["1"]) < 1e-6 < 1e-4 < min(nats[1]["1"], nats[3]["1"])
    assert (
        "note        `config.num_key_value_heads` raises an error in transformers, since layers "
        "differ" in made.err
    )
    cache = told["kv_cache"]
    assert cache["bytes_per_token_after"] == 0.625 * cache["bytes_per_token_before"]
    run(uneven, "--kv-heads", "1,4,1,4", *words, "-o", tmp_path / "named")
    assert contents(tmp_path / "budget") == contents(tmp_path / "named")
    record = json.loads((tmp_path / "budget/gqa_conversion.json").read_text())
    assert record["options"]["kv_heads"] == [1, 4, 1, 4]
    # One layer with one head makes no multi-query attention
    tags = (tmp_path / "budget/README.md").read_text().split("---")[1]
    assert "grouped-query-attention" in tags
    assert "multi-query-attention" not in tags


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--kv-heads", "1,2"), "--kv-heads has numbers for 2 layers, but model has 4 layers"),
        (("--kv-heads", "1,3,1,1"), "--kv-heads 3 of layer 1 does not divide the 4"),
        (
            ("--kv-heads", "1,x,1,1"),
            "'1,x,1,1' is not a number of KV heads; pass a positive whole number, or one for",
        ),
        (
            ("--kv-heads", "1", "--kv-budget", "0.5"),
            "--kv-heads and --kv-budget cannot be combined",
        ),
        ((), "--kv-heads is missing; model has 4 KV heads: pass 1 or 2"),
        # Measuring takes them
        (("--kv-budget", "0.2", "--method", "mean", "--tokens", "512"), "pass at least 0.25"),
        (("--kv-budget", "0.5", "--dry-run"), "--kv-budget and --dry-run cannot be combined"),
    ],
)
def test_refused(uneven: Path, words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    check_refused(run(uneven, *words, "-o", tmp_path / "out"), says)
    assert not (tmp_path / "out").exists()


def test_refused_before_anything_is_measured(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that is taken, a class whose layers cannot differ, and whatever the conversion would
    refuse.
    """
    forbid(monkeypatch, "gqa.convert.merge.calibration_reader.sampled_blocks", "it was measured")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")
    check_refused(
        run(uneven, "--kv-budget", "0.5", "-o", tmp_path / "out"),
        "out exists; choose another directory with -o",
    )
    assert "--target-column" in refusal(uneven, "--kv-budget", "0.5", "--target-column", "x")
    # Text that measures layers, also for a method that reads none
    missing = ("--method", "mean", "--data", "missing.txt")
    assert "missing.txt" in refusal(uneven, "--kv-budget", "0.5", *missing)
    # The default output has the share in its name, whatever the heads of each layer will be
    out = uneven.with_name(f"{uneven.name}-kv50-refined")
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert f"{out.name} exists" in refusal(uneven, "--kv-budget", "0.5")


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[1] / "docs/models.md").read_text(encoding="utf-8")
    listed = page.partition("Model types: ")[2].partition(". Others")[0]
    assert listed.replace("\n", " ").split(", ") == sorted(BY_LAYER)


def test_a_class_that_is_not_known_to_allow_it(tmp_path: Path) -> None:
    model = write_checkpoint(build(TINY["starcoder2"], QUERY_HEADS), tmp_path / "model")
    head = "LlamaForSequenceClassification"
    edit_json(model / "config.json", lambda raw: raw | {"model_type": "nemotron"})
    for words in (("--kv-budget", "0.5"), ("--kv-heads", "1,4")):
        assert "the same number of KV heads in all layers" in refusal(model, *words)
    edit_json(
        model / "config.json", lambda raw: raw | {"model_type": "llama", "architectures": [head]}
    )
    assert f"{head} does not predict tokens" in refusal(model, "--kv-heads", "1,4")
    different = llama(tmp_path / "llama")
    out = convert_checkpoint(different, (1, 4), method="mean").out
    assert out.name == "llama-kv62-mean"  # of the key/value heads, not of the query heads
    assert "convert the base model" in refusal(out, "--kv-heads", "1,2")
