"""Every family against transformers' own classes: the oracles of a conversion, each with a control
that must fail.

A tiny random model is written as a checkpoint with keys and values of one layer in different
shards, converted by the streaming rewriter, and loaded again with transformers. Tolerances are
relative to the largest logit, float32.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import transformers
from support.evaluations import cache_bytes
from support.families import (
    CONTROL,
    TOLERANCE,
    attention_of,
    check_same_tensors,
    decode,
    error,
    left_padded,
    load,
    louder,
    planned,
    tiled_heads,
    write_checkpoint,
)
from support.scrambled import ALIGNING, NAMES, on_ids, relative, scramble
from support.tiny_configs import COPIES
from support.tiny_models import (
    LEFT_OUT,
    QUERY_HEADS,
    TINY,
    Tiny,
    build,
    config,
    inputs,
    logits,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from gqa.convert.api import Plan, convert_checkpoint, plan_conversion
from gqa.convert.heads import config as heads_config
from gqa.convert.heads.config import read_config
from gqa.convert.heads.config_edits import valid_kv_heads
from gqa.convert.heads.families.table import FAMILIES, NESTED, REFUSED
from gqa.convert.heads.family import Family, Symmetry
from gqa.convert.heads.layouts import Rule, Separate
from gqa.convert.recast.targets import RECASTINGS
from gqa.core.errors import RefusedError

COPIED = {f"gqa_{name}" for name in COPIES}


# transformers looks up `vision_start_token_id` in these configs as soon as a mask is given; they do
# not have it.
NO_MASK = {"qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"}


def decodes_text(name: str) -> bool:
    """Whether a family takes token ids alone (nothing encoded beside them) and keeps a cache."""
    tiny = TINY[name]
    token_ids_only = dict(tiny.token_inputs) == {"input_ids": ()} and not tiny.float_inputs
    return tiny.has_cache and token_ids_only and name not in NO_MASK


# One model type of each family, whose tensors are merged, repeated and left alone in the same way.
EXAMPLES = {next(iter(family.symmetries)) for family in FAMILIES}


# Copies are held against the classes that they extend by test_custom_code.
@pytest.mark.parametrize("name", [name for name in TINY if name not in COPIED])
def test_conversion(name: str, tmp_path: Path) -> None:
    """Every oracle on an example of each family, with each number of heads that it can have; on its
    other model types those that their own classes decide, with the most heads.
    """
    # constraints-lowest.txt has one that runs it
    if name == "llama4" and transformers.__version__ == "5.24.0":
        pytest.skip(
            "the forward pass of transformers 5.24.0's Llama 4 with pictures fails (image_outputs)"
        )
    tiny = TINY[name]
    model = louder(tiny, build(tiny, QUERY_HEADS, attention=attention_of(name)))
    source = write_checkpoint(model, tmp_path / "source")
    heads = read_config(json.loads((source / "config.json").read_text()), name)
    groups = [g for g in valid_kv_heads(heads) if g < QUERY_HEADS]
    assert groups, "a family that cannot be converted does not belong in the table"
    if example := heads.text_config.model_type in EXAMPLES:
        check_same_tensors(convert_checkpoint(source, QUERY_HEADS, tmp_path / "whole").out, source)
    for g, method in zip(groups if example else groups[-1:], ("first", "mean"), strict=False):
        place = tmp_path / f"{method}{g}"
        plan, merged, back = expand_back(tiny, model, source, g, place)
        # Oracle 2: heads that are equal inside each group merge to what they are, in any way
        if example:
            repeated = convert_checkpoint(place / "merged", QUERY_HEADS, place / "back").out
            again = convert_checkpoint(repeated, g, place / "again", method=method).out
            check_same_tensors(again, place / "merged", TOLERANCE)
    if decodes_text(name):
        check_padding_and_cache(tiny, merged, back)
    counted = decodes_text(name) or name in ("mllama", "gqa_t5")
    # The first keeps them in an object without layers, the other keys and values of all query
    # heads.
    if counted and heads.text_config.model_type not in ("unlimited_ocr_text", "falcon"):
        for one, promised in ((model, plan.cache_before), (merged, plan.cache_after)):
            for tokens in (1, 4, 15):  # windows are of 5
                assert sum(cache_bytes(one, tokens, 2)) == 2 * promised.bytes_at(tokens)
        if "falcon" not in name:
            assert plan.cache_after.bytes_per_token < plan.cache_before.bytes_per_token


def expand_back(
    tiny: Tiny, model: PreTrainedModel, source: Path, groups: int, place: Path
) -> tuple[Plan, PreTrainedModel, PreTrainedModel]:
    """Oracles 4 and 5: merged, then every head repeated, gives the same logits; repeated in tiles,
    it does not.

    The merged checkpoint is read by transformers with G heads and the repeated one with H: only the
    contiguous order makes both the same model. The same holds for the source's own logits being
    left (a merge that does nothing would pass otherwise). The plan and both models are returned.
    """
    given, attention = inputs(tiny), attention_of(tiny.name)
    made = convert_checkpoint(source, groups, place / "merged", method="mean")
    merged = load(tiny, made.out, attention)
    expected = logits(tiny, merged, given)
    assert error(expected, logits(tiny, model, given)) > TOLERANCE * 10, (
        "merging random heads must change the model"
    )
    # `planned` loads it, in the source's class
    with mock.patch("gqa.convert.planning.check_loads", return_value=()):
        expansion = plan_conversion(made.out, QUERY_HEADS)
    back = planned(tiny, expansion, attention)
    assert error(logits(tiny, back, given), expected) < TOLERANCE
    if groups > 1:  # one head repeated has no order
        with tiled_heads():
            tiled = planned(tiny, expansion, attention)
        assert error(logits(tiny, tiled, given), expected) > TOLERANCE * CONTROL
    return made.plan, merged, back


def check_padding_and_cache(tiny: Tiny, merged: PreTrainedModel, back: PreTrainedModel) -> None:
    """Oracle 4 once more with left padding, and token by token from the cache of G heads."""
    plain, given = inputs(tiny), left_padded(inputs(tiny), 3)
    kept = given["attention_mask"].bool()
    assert error(logits(tiny, back, given)[kept], logits(tiny, merged, given)[kept]) < TOLERANCE
    assert error(decode(merged, plain, 10), decode(back, plain, 10)) < TOLERANCE


def test_every_family_has_a_tiny_model() -> None:
    """A family nobody built is a family nobody tested."""
    stated = {t for family in FAMILIES for t in family.symmetries}
    assert stated - LEFT_OUT <= {
        t for name in TINY for t in (TINY[name].model_type, text_type(name))
    }


def text_type(name: str) -> str:
    """The model type of the text part of a tiny model."""
    if TINY[name].model_type not in NESTED:
        return TINY[name].model_type
    part = config(TINY[name], QUERY_HEADS)
    for step in NESTED[TINY[name].model_type]:
        part = getattr(part, step)
    return str(part.model_type)


def test_no_model_type_is_in_two_tables() -> None:
    stated = [t for family in FAMILIES if not family.only_if for t in family.symmetries]
    assert len(stated) == len(set(stated))
    assert not set(stated) & set(REFUSED)
    assert not set(NESTED) & set(REFUSED)
    assert not {entry.source for entry in RECASTINGS} & {*stated, *REFUSED}
    assert {entry.target for entry in RECASTINGS} <= {*stated}
    for family in FAMILIES:  # each type has a symmetry or says why not
        assert family.symmetries
        assert all(family.symmetries.values())
        assert family.symmetries.keys() >= family.not_layerwise.keys()


def test_refused() -> None:
    """What cannot be converted is refused by its type, or by what its config says,
    with the reason.
    """
    mla = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "kv_lora_rank": 8}
    for raw, reason in (
        *(({"model_type": name}, REFUSED[name]) for name in REFUSED),
        (mla, REFUSED["deepseek_v3"]),
    ):
        with pytest.raises(RefusedError, match=rf"cannot be converted: {re.escape(reason)}"):
            read_config(raw, "model")


# --------------------------------------------------------- an architecture is one entry in one file


ENTRY = Family(
    "k_proj and v_proj of the new one",
    {"new_llama": Symmetry(query="q_proj", output="o_proj", norms=("input_layernorm",))},
    attention=("self_attn",),
    rules=(Rule("k_proj", Separate("key")), Rule("v_proj", Separate("value"))),
)


class NewConfig(LlamaConfig):
    model_type = "new_llama"


class NewForCausalLM(LlamaForCausalLM):
    config_class = NewConfig


def test_one_entry_in_one_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class that only the Auto classes know, with the weights of a tiny Llama."""
    AutoConfig.register("new_llama", NewConfig, exist_ok=True)
    AutoModelForCausalLM.register(NewConfig, NewForCausalLM, exist_ok=True)
    tiny = TINY["llama"]
    settings = {
        name: value for name, value in config(tiny, 2).to_dict().items() if name != "model_type"
    }
    model = NewForCausalLM(NewConfig(**settings)).eval()
    model.load_state_dict(build(tiny, 2).state_dict())
    source, expected = (
        write_checkpoint(model, tmp_path / "source"),
        logits(tiny, model, inputs(tiny)),
    )

    def error_of(out: Path) -> float:
        return relative(logits(tiny, NewForCausalLM.from_pretrained(out), inputs(tiny)), expected)

    with pytest.raises(RefusedError, match="new_llama, which is not supported"):
        convert_checkpoint(source, 4, tmp_path / "four", method="mean")
    # An entry as another model type would get
    monkeypatch.setattr(heads_config, "FAMILIES", (*heads_config.FAMILIES, ENTRY))
    four = convert_checkpoint(source, 4, tmp_path / "four", method="mean").out
    scramble(four)
    assert error_of(four) < 1e-5
    # `procrustes` undoes rotations only
    for method in ("mean", *(name for name in ALIGNING if name != "procrustes")):
        out = convert_checkpoint(
            four, 2, tmp_path / method, method=method, maps_options=on_ids()
        ).out
        if method == "mean":
            assert error_of(out) > 0.01
        else:
            assert error_of(out) < 1e-4, method


# ------------------------------------------- what `refined` trains of heads that cannot be aligned


UNALIGNED = {
    model_type
    for family in FAMILIES
    for model_type, symmetry in family.symmetries.items()
    if isinstance(symmetry, str) and model_type not in family.not_layerwise
}


def refined_tensors(name: str, place: Path) -> list[set[str]]:
    """The tensors of each attention module that `refined` changes in a tiny model, by the names of
    their rules.
    """
    model = write_checkpoint(build(TINY[name], QUERY_HEADS), place)
    groups = max(count for count in TINY[name].kv_counts if count < QUERY_HEADS)
    plan = plan_conversion(model, groups, method="refined")
    return [{change.rule.tensor for change in changes} for changes in plan.changes.values()]


@pytest.mark.parametrize("name", [name for name in TINY if TINY[name].model_type in UNALIGNED])
def test_queries_and_outputs_are_trained_where_heads_cannot_be_aligned(
    name: str, tmp_path: Path
) -> None:
    queries = {*NAMES["query"], *NAMES["stacked"], *NAMES["per_head"]}
    for tensors in refined_tensors(name, tmp_path / "m"):
        assert tensors & queries
        assert tensors & {*NAMES["output"]}


def test_a_family_names_the_queries_and_outputs_of_heads_that_cannot_be_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moshi,) = (family for family in FAMILIES if "moshi" in family.symmetries)
    unaligned = replace(
        moshi,
        symmetries={"moshi": "a reason"},
        query_side=("q_proj.linear", "o_proj.linear"),
    )
    monkeypatch.setattr(heads_config, "FAMILIES", (unaligned,))
    expected = {"q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"}
    for tensors in refined_tensors("moshi", tmp_path / "m"):
        assert tensors == expected
