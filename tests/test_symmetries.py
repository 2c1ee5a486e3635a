"""The table of symmetries against transformers' own classes, and the methods that undo what the
table allows.

A model with two key/value heads is expanded to four, and every head moved by a random member of its
symmetry group: the logits stay, `mean` destroys the model, and a method that aligns heads brings
the model with two back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import attention_of, load, louder, planned, write_checkpoint
from support.scrambled import ALIGNING, Ids, on_ids, rearrange, relative, scramble
from support.tiny_models import QUERY_HEADS, TINY, Tiny, build, inputs, logits
from torch import Tensor, nn
from transformers import PreTrainedModel

from gqa.convert.api import Plan, convert_checkpoint, plan_conversion
from gqa.convert.head_maps import HeadMaps
from gqa.convert.heads.families.table import FAMILIES
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.layouts import Separate, Transposed
from gqa.convert.heads.modules import AttentionModule, attention_modules
from gqa.convert.heads.rotary import Rotary
from gqa.convert.merge.calibrate import Calibrator
from gqa.convert.merge.input_moments import norm_gain
from gqa.convert.merge.pair import ModelPair
from gqa.convert.merge.rope import unrotate
from gqa.convert.methods.table import METHODS
from gqa.core.errors import RefusedError
from gqa.models.names import parameter_names

SAME = 1e-5  # of the logits' range: the symmetry holds
RECOVERED = 1e-4
CONTROL = 100 * RECOVERED

# Aligned from their weights; their classes cannot be run layer by layer on token ids alone.
UNSERVED = {name: why for family in FAMILIES for name, why in family.not_layerwise.items()}
STATED = {name: found for family in FAMILIES for name, found in family.symmetries.items()}
TYPES = sorted(name for name, found in STATED.items() if isinstance(found, Symmetry))
# Text parts that only exist in a larger model, and the name of that.
WITHIN = {
    "blt_global_transformer": "blt",
    "canary_decoder": "canary",
    "dia_decoder": "dia",
    "t5_gemma_module": "t5gemma",
    "t5gemma2_decoder": "t5gemma2",
}
SEVERAL = ("llama+bias", "gpt_oss", "cohere", "phi3", "qwen3", "mixtral", "olmo2")


def _other(name: str, suffix: str, **options: object) -> Tiny:
    return replace(TINY[name], name=f"{name}+{suffix}", options={**TINY[name].options, **options})


CASES: dict[str, Tiny] = {
    model_type: TINY[WITHIN.get(model_type, model_type)] for model_type in TYPES
} | {
    # With the option of the tiny model nothing may be changed, see
    # test_options_that_take_a_symmetry_away.
    "olmo": TINY["olmo+unclipped"],
    "olmoe": _other("olmoe", "unclipped", clip_qkv=None),
    # Options that a symmetry depends on, biases, wide heads, several query heads a key/value head.
    **{
        name: TINY[name]
        for name in (
            "cohere+qk_norm",
            "falcon+rw",
            "glm4_moe+qk_norm",
            "granitemoehybrid+nope",
            "llama+bias",
            "llama+wide",
            "molmo2_text+olmo_norm",
            "nemotron+bias",
            "phi+qk_norm",
            "recurrent_gemma+bias",
        )
    },
    "llama+queries": _other("llama", "queries", num_attention_heads=8),
    "glm+queries": _other("glm", "queries", num_attention_heads=8),
}
# One model type of each kind: of those whose heads are stored alike and can be changed alike; and
# what options change.
_KINDS = {
    (family.name, found): name
    for family in FAMILIES
    for name, found in reversed(family.symmetries.items())
}
EXAMPLES = {*SEVERAL, *_KINDS.values(), *(name for name in CASES if "+" in name)}

# Whose pairs are merged each for itself, since their config says nothing of a longest text.
UNLIMITED = ("recurrent_gemma", "recurrent_gemma+bias")
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
# Embeddings that are scaled, or choose their frequencies by the length of the text: a model, its
# embedding, lengths.
SCALED: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "linear": ("llama", {}, (24,)),
    "dynamic": ("llama", {}, (8, 24, 100)),
    "yarn": ("qwen2", {"original_max_position_embeddings": 16}, (24,)),
    "longrope": ("phi3", {"original_max_position_embeddings": 16, **_FACTORS}, (8, 24, 100)),
}


@pytest.fixture(autouse=True)
def _loading_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether transformers loads the result of each model type is checked in test_families."""
    monkeypatch.setattr("gqa.convert.planning.check_loads", lambda *given: ())


def attention(tiny: Tiny) -> str:
    return attention_of(tiny.name.split("+")[0])


def scrambled(
    tiny: Tiny, place: Path, pairing: str | None = None, empty: tuple[int, ...] = ()
) -> tuple[Path, Tensor, int]:
    """A checkpoint with scrambled heads, the logits that it must have, and the number of heads that
    suffice.

    The embeddings of the tokens `empty` are zero.
    """
    kv = 2 if 2 in tiny.kv_counts else 1
    model = louder(tiny, build(tiny, kv, attention=attention(tiny)))
    if empty:
        model.get_input_embeddings().weight.data[list(empty)] = 0
    directory = convert_checkpoint(
        write_checkpoint(model, place / "source"), QUERY_HEADS, place / "scrambled"
    ).out
    scramble(directory, pairing=pairing)
    return directory, logits(tiny, model, inputs(tiny)), kv


def by(plan: Plan, method: str) -> Plan:
    """The same by another method, of which every tensor that it changes is in the plan."""
    return replace(plan, method=METHODS[method])


aligned_maps = METHODS["aligned"].maps_by_module


def merged_logits(tiny: Tiny, plan: Plan, maps: Mapping[str, HeadMaps] | None = None) -> Tensor:
    """Of the model that a plan makes, without writing it; `maps` of all modules need not be on
    disk.
    """
    held: Any = maps and SimpleNamespace(of_module=lambda module: maps[module], names=())
    made = planned(tiny, plan, attention(tiny), held)
    return logits(tiny, made, inputs(tiny))


def text_of(tiny: Tiny) -> dict[str, Tensor]:
    """What a model is calibrated on: of an encoder-decoder, pairs of other lengths than each other,
    with padding.
    """
    if "decoder_input_ids" not in tiny.token_inputs:
        return {"input_ids": Ids(high=tiny.tokens).ids()}
    given = inputs(tiny, 64, 24) | {"decoder_input_ids": inputs(tiny, 64, 16)["decoder_input_ids"]}
    rows = torch.arange(64)[:, None]
    if "input_ids" in given:
        given["attention_mask"] = (torch.arange(24) < 12 + rows % 13).long()
    return given | {"decoder_attention_mask": (torch.arange(16) < 8 + rows % 9).long()}


@torch.no_grad()
def after_layers(model: PreTrainedModel, layers: str, given: dict[str, Tensor]) -> Tensor:
    """Hidden states after the last layer, from the model's own forward pass."""
    found: list[Tensor] = []
    stack = model.get_submodule(layers)
    assert isinstance(stack, nn.ModuleList)
    hook = stack[-1].register_forward_hook(lambda _, args, output: found.append(output))
    model(**given)
    hook.remove()
    return found[0] if isinstance(found[0], Tensor) else found[0][0]


@pytest.mark.parametrize("name", CASES)
def test_scrambled_heads_are_recovered(name: str, tmp_path: Path) -> None:
    """The gauge oracle, and on the way: what went through the layers one at a time is the model's
    own.
    """
    tiny = CASES[name]
    directory, expected, kv = scrambled(tiny, tmp_path)
    model = load(tiny, directory, attention(tiny))
    assert relative(logits(tiny, model, inputs(tiny)), expected) < SAME, (
        "the table allows what changes the model"
    )
    plan = by(plan_conversion(directory, kv, method="procrustes"), "aligned")
    check_gains(tiny, model, plan)
    if example := name in EXAMPLES:
        assert relative(merged_logits(tiny, by(plan, "mean")), expected) > CONTROL
        assert relative(merged_logits(tiny, plan, dict(aligned_maps(plan))), expected) < RECOVERED
    plan = by(plan, "calibrated")
    if why := UNSERVED.get(name.partition("+")[0]):
        with pytest.raises(
            RefusedError, match=f"cannot be run layer by layer: {why}; use method first, mean"
        ):
            plan_conversion(directory, kv, method="calibrated")
        with pytest.raises(RefusedError, match="cannot be run layer by layer"):  # it is true
            calibrated(text_of(tiny), plan)
    else:
        given = text_of(tiny)
        calibrator, maps = calibrated(given, plan)
        if "decoder_input_ids" in given:
            kinds = {module.kind for module in attention_modules(plan.checkpoint, plan.config)}
            if name not in ("dia_decoder", "t5gemma2_decoder"):
                assert kinds == {"decoder-self", "cross"}
        else:
            check_frequencies(calibrator.pair, tiny.name, 16)
        given = inputs(tiny, 64, 16) | given
        hidden = after_layers(model, calibrator.pair.base_model.prefix, given)
        assert relative(calibrator.calibration_states.base.hidden, hidden) < SAME
        assert relative(calibrator.calibration_states.converted.hidden, hidden) < RECOVERED
        if example:
            assert relative(merged_logits(tiny, plan, maps), expected) < RECOVERED
    symmetry = plan.config.symmetry
    reorders = isinstance(symmetry, Symmetry) and symmetry.can_reorder_heads(
        plan.config.text_config
    )
    if kv == 2 and reorders:
        check_places(tiny, directory, expected, example)


# Decoders, one of each kind of them; encoder-decoders and types with several tables of embeddings
# are above.
DECODERS = sorted(
    name
    for name in EXAMPLES & CASES.keys()
    if name.partition("+")[0] not in UNSERVED and [*CASES[name].token_inputs] == ["input_ids"]
)


@pytest.mark.parametrize("name", DECODERS)
def test_heads_are_recovered_where_tokens_have_no_embedding(name: str, tmp_path: Path) -> None:
    """As rows of padding and untrained tokens, which a model's own samples contain."""
    tiny = CASES[name]
    directory, expected, kv = scrambled(tiny, tmp_path, empty=(10, 11))
    plan = by(plan_conversion(directory, kv, method="procrustes"), "calibrated")

    _, maps = calibrated(text_of(tiny), plan)

    assert relative(merged_logits(tiny, plan, maps), expected) < RECOVERED


def calibrated(
    given: dict[str, Tensor], plan: Plan, **options: Any
) -> tuple[Calibrator, dict[str, HeadMaps]]:
    """What has gone through all layers, and the maps, which lose nothing."""
    calibrator = Calibrator(plan, given, on_ids(**options))
    results = [result for layer in range(calibrator.n_layers) for result in calibrator.run(layer)]
    assert results
    assert all(result.error < 1e-6 for result in results)
    return calibrator, {result.module.path: result.maps for result in results}


def check_frequencies(pair: ModelPair, name: str, length: int) -> None:
    """A layer that is given the same at every position has the same queries and keys there, without
    rotation.
    """
    symmetry, text, found = (
        pair.symmetry,
        pair.config.text_config,
        list[tuple[AttentionModule, Rotary]](),
    )
    assert symmetry
    for module in (module for layer in range(pair.n_layers) for module in pair.modules_of(layer)):
        key_dim = pair.config.heads(module.layer).key_dim
        found.append((module, symmetry.rotary(text, module.layer, key_dim, length)))
    known = [(module, rotary) for module, rotary in found if rotary.frequencies]
    turned = symmetry.can_align_keys(text) and any(rotary.dims for _, rotary in found)
    assert bool(known) == (turned and name not in UNLIMITED)
    for module, rotary in known[:1]:
        stream = pair.states_before_layers({"input_ids": torch.full((1, length), 5)})
        stream.hidden = torch.randn(stream.hidden.shape[-1]).expand(1, length, -1)
        attention = pair.base_model.load(module.layer).attention(module.path)
        (capture,) = attention.capture(stream, "heads")
        pair.base_model.release(module.layer)
        for heads in capture.heads[:2]:
            before, after = (
                (h - h[:, :, :1]).abs().max() for h in (unrotate(heads, rotary), heads)
            )
            assert before < 1e-4 * after


def check_places(tiny: Tiny, directory: Path, expected: Tensor, example: bool) -> None:
    """Heads can change places; and are found again: which belong together is searched for,
    neighbors no longer do.
    """
    rearrange(directory)
    moved = load(tiny, directory, attention(tiny))
    assert relative(logits(tiny, moved, inputs(tiny)), expected) < SAME, (
        "something that belongs to a head stayed"
    )
    if not example:
        return
    plan = by(plan_conversion(directory, 2, method="procrustes"), "aligned")
    found = dict(aligned_maps(plan, search=True))
    assert relative(merged_logits(tiny, plan, found), expected) < RECOVERED
    assert any(maps.order for maps in found.values())
    if tiny.name in SEVERAL:
        assert relative(merged_logits(tiny, plan, dict(aligned_maps(plan))), expected) > CONTROL
        maps = calibrated(text_of(tiny), by(plan, "calibrated"))[1]
        assert relative(merged_logits(tiny, plan, maps), expected) < RECOVERED


@pytest.mark.parametrize("kind", [*SCALED, "wide"])
def test_queries_and_keys_are_unrotated(kind: str, tmp_path: Path) -> None:
    """Where frequencies are not those of the types above; and where only a part of wide heads is
    rotated.
    """
    name, options, lengths = SCALED.get(kind, ("stablelm", {}, (24,)))
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | options
    changed = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    tiny = replace(
        TINY[name], options={"head_dim": 32, "hidden_size": 128} if kind == "wide" else changed
    )
    directory = write_checkpoint(
        build(tiny, QUERY_HEADS, attention=attention(tiny)), tmp_path / "source"
    )
    for length in lengths:
        pair = ModelPair(plan_conversion(directory, 1, method="calibrated"), on_ids(most_blocks=1))
        check_frequencies(pair, kind, length)


@pytest.mark.parametrize(
    ("name", "pairing"), [("llama", "interleaved"), ("cohere", "half"), ("glm4_moe", "interleaved")]
)
def test_another_pairing_is_no_symmetry(name: str, pairing: str, tmp_path: Path) -> None:
    """The control of the table itself: a wrong entry would show."""
    directory, expected, _ = scrambled(TINY[name], tmp_path, pairing)
    model = load(TINY[name], directory, attention(TINY[name]))
    assert relative(logits(TINY[name], model, inputs(TINY[name])), expected) > CONTROL


@torch.no_grad()
def check_gains(tiny: Tiny, model: PreTrainedModel, plan: Plan) -> None:
    """Attention reads the stream, normalized and multiplied with the gain that `aligned` takes for
    it.
    """
    symmetry = plan.config.symmetry
    assert isinstance(symmetry, Symmetry)
    names, seen = parameter_names(model), list[Tensor]()

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    for module in attention_modules(plan.checkpoint, plan.config):
        if module.kind == "cross":  # it reads another stream
            continue
        seen.clear()
        stored = module.path.partition(f".{module.layer}.")[0]
        name, own = next(
            (name, own) for name, own in names.items() if name.startswith(f"{module.path}.")
        )
        below = own.rsplit(".", name.removeprefix(module.path).count("."))[0].partition(
            f".{module.layer}."
        )[2]
        layer = model.get_submodule(own.partition(f".{module.layer}.")[0]).get_submodule(
            str(module.layer)
        )
        hooks = [
            part.register_forward_pre_hook(note, with_kwargs=True)
            for part in (layer, layer.get_submodule(below))
        ]
        model(**inputs(tiny))
        for hook in hooks:
            hook.remove()
        stream, read = (tensor.double() for tensor in seen)
        biases = [
            plan.checkpoint.tensors.get(f"{stored}.{module.layer}.{norm}.bias")
            for norm in symmetry.norms
        ]
        bias = next(
            (plan.checkpoint.read(spec).double() for spec in biases if spec),
            torch.zeros(stream.shape[-1]),
        )
        normal = (read - bias) / norm_gain(plan.checkpoint, module, symmetry, stream.shape[-1])
        centered = stream - stream.mean(-1, keepdim=True)
        likeness = [
            float(torch.cosine_similarity(normal, one, dim=-1).min()) for one in (stream, centered)
        ]
        assert max(likeness) > 1 - 1e-6, (module.path, likeness)


def test_options_that_take_a_symmetry_away(tmp_path: Path) -> None:
    """Clipped values and gates of each dimension: nothing is known to be free, and the methods say
    so.
    """
    gated = _other("laguna", "gated", gating="per-element")
    reasons = {
        "olmo": "with clip_qkv",
        "olmoe": "with clip_qkv",
        "bitnet": "a norm over all heads",
        "gemma4_text": "its value norm",
    }
    cases = [
        *((TINY[name], why) for name, why in reasons.items()),
        (gated, "unless gating is per head"),
    ]
    for number, (tiny, why) in enumerate(cases):
        directory = write_checkpoint(build(tiny, QUERY_HEADS), tmp_path / str(number))
        for method in ALIGNING:
            with pytest.raises(
                RefusedError,
                match=rf"cannot align the heads of {number} \({tiny.model_type}\): {why}",
            ):
                convert_checkpoint(
                    directory, 2, tmp_path / "out", method=method, maps_options=on_ids()
                )
    assert not (tmp_path / "out").exists()


def test_procrustes_undoes_rotations(tmp_path: Path) -> None:
    """Its own group: heads that differ by phases and by rotations of the values, but not by
    anything else.
    """
    tiny = TINY["llama+bias"]
    source = write_checkpoint(model := build(tiny, 2), tmp_path / "source")
    directory, expected = (
        convert_checkpoint(source, 4, tmp_path / "equal").out,
        logits(tiny, model, inputs(tiny)),
    )
    scramble(directory, stretch=False)
    assert relative(logits(tiny, load(tiny, directory), inputs(tiny)), expected) < SAME
    out = convert_checkpoint(directory, 2, tmp_path / "out", method="procrustes").out
    assert relative(logits(tiny, load(tiny, out), inputs(tiny)), expected) < RECOVERED


def test_matrices_that_are_stored_the_other_way_round_are_so_for_queries_too() -> None:
    layouts = [rule.layout for rule in Symmetry(stores_transposed=True).query_side_rules]
    assert layouts == [Transposed(Separate("query")), Transposed(Separate("output", axis=1))]
