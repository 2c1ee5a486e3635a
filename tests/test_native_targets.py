"""Models written for another class, against both classes of transformers: the oracles, each with a control.

The source class computes what is expected: its own logits at G = H, and at fewer heads those of the source whose heads
are tied in its own layout (tests/tiny_native.py). Differences are relative to the range of the logits, in float32.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from scrambled import relative
from test_families import all_tensors, decode, left_padded, write_checkpoint
from tiny_models import build, inputs
from tiny_native import CASES, Case, tie_heads
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gqa.convert import convert_checkpoint, plan_conversion

SAME = 1e-5
CONTROL = 100 * SAME
# Options that change what is merged; the others differ in the config alone, which identity shows.
MERGED = [name for name in CASES if "+" not in name] + [
    "gpt_neox+plain", "gpt_neox+rotary", "codegen+eight", "gpt2+scaled",
]  # fmt: skip
SMALLER = [(name, g) for name in MERGED for g in CASES[name].groups[1:]]


@cache
def source_model(name: str) -> PreTrainedModel:
    return build(CASES[name].tiny, 4, attention="eager")


def tied_model(name: str, groups: int, tiled: bool = False) -> PreTrainedModel:
    """The source whose heads are equal in each group."""
    tied = build(CASES[name].tiny, 4, attention="eager")
    tie_heads(tied, groups, tiled)
    return tied


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


@torch.no_grad()
def logits(model: PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**given).logits
    return found


@pytest.mark.parametrize("name", CASES)
def test_identity(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """G = H: the other class gives the source's logits, also with padding on the left and token by token."""
    case, source = CASES[name], source_model(name)
    result = convert_checkpoint(checkpoint(name), case.groups[0], tmp_path / "out", checksums=True, method="mean")
    given = inputs(case.tiny)
    for attention in ("eager", "sdpa"):
        target = load(result.out, attention)
        assert target.config.model_type == case.target
        assert target.config.num_key_value_heads == source.config.num_attention_heads
        assert relative(logits(target, given), logits(source, given)) < SAME
    if case.exact:
        assert torch.equal(logits(load(result.out, "eager"), given), logits(source, given))
    padded = left_padded(given, 3)
    kept = padded["attention_mask"].bool()
    assert relative(logits(target, padded)[kept], logits(source, padded)[kept]) < SAME
    assert relative(decode(target, given), decode(source, given)) < SAME
    assert relative(logits(target, given), logits(source, inputs(case.tiny, seed=1))) > CONTROL


@pytest.mark.parametrize(("name", "groups"), SMALLER)
def test_expand_back(name: str, groups: int, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Merged heads, each repeated in the source class, give the logits of the converted model; in tiles they do not."""
    case = CASES[name]
    out = convert_checkpoint(checkpoint(name), groups, tmp_path / "out", method="mean").out
    target, given = load(out), inputs(case.tiny)
    assert target.config.num_key_value_heads == groups
    found = logits(target, given)
    assert relative(found, logits(tied_model(name, groups), given)) < SAME
    assert relative(found, logits(source_model(name), given)) > CONTROL
    if groups > 1:
        assert relative(found, logits(tied_model(name, groups, tiled=True), given)) > CONTROL


# ------------------------------------------------------------------------------------------- how it is written


@torch.no_grad()
def positive(case: Case) -> PreTrainedModel:
    """In half precision. Nothing cancels: sums in float32 are right to a few of its last digits, in any order."""
    model = build(case.tiny, 4).half()
    for parameter in model.parameters():
        parameter.abs_()
    return model


def folded(case: Case, groups: int) -> dict[str, Tensor]:
    """What a few tensors of Phi must be, from the parameters of GPT-NeoX by the formula: weights in float32, sums of
    products in float64.
    """
    state = {name: tensor.float() for name, tensor in positive(case).state_dict().items()}
    at = "gpt_neox.layers.0."
    w, b = (state[f"{at}attention.query_key_value.{kind}"].view(4, 3, 8, -1) for kind in ("weight", "bias"))
    gain, shift = state[f"{at}input_layernorm.weight"], state[f"{at}input_layernorm.bias"]
    keys, biases = w[:, 1] * gain, b[:, 1, :, 0] + w[:, 1].double() @ shift.double()
    up, norm = state[f"{at}mlp.dense_h_to_4h.weight"], f"{at}post_attention_layernorm"
    return {
        "model.layers.0.self_attn.k_proj.weight": keys.view(groups, -1, 8, 32).mean(1).flatten(0, 1),
        "model.layers.0.self_attn.k_proj.bias": biases.view(groups, -1, 8).mean(1).flatten(),
        "model.layers.0.mlp.fc1.weight": up * state[f"{norm}.weight"],
        "model.layers.0.mlp.fc1.bias": state[f"{at}mlp.dense_h_to_4h.bias"]
        + up.double() @ state[f"{norm}.bias"].double(),
    }


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    """Folding and merging are done in float32; only the result is rounded, also for another --dtype."""
    case = CASES["gpt_neox"]
    directory = write_checkpoint(positive(case), tmp_path / "source")
    for dtype in (None, "bfloat16", "float32"):
        kind = getattr(torch, dtype or "float16")
        tensors = all_tensors(
            convert_checkpoint(directory, 2, tmp_path / str(dtype), dtype=dtype, checksums=True, method="mean").out
        )
        assert {tensor.dtype for tensor in tensors.values()} == {kind}
        for name, exact in folded(case, 2).items():
            wrong = (tensors[name].float() - exact).abs() / exact.abs().clamp(min=1e-3)
            assert float(wrong.max()) < 4 * torch.finfo(kind).eps, name
            if name.endswith("weight"):  # sums of products round as their order does
                assert torch.equal(tensors[name], exact.to(kind)), name
    config = json.loads((tmp_path / "bfloat16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2+scaled"])
def test_bin_files_and_shards_give_the_same(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint of torch's own format, other shards, several jobs: the same tensors. And gpt2 without a prefix."""
    expected = all_tensors(convert_checkpoint(checkpoint(name), 1, tmp_path / "expected", method="mean").out)
    model = source_model(name)
    (tmp_path / "bin").mkdir()
    model.config.save_pretrained(tmp_path / "bin")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items() if k not in tied}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8)} if "gpt2" in name else {}  # the mask of old checkpoints
    torch.save(state, tmp_path / "bin" / "pytorch_model.bin")
    sharded = {"max_shard_size": 5000, "jobs": 2}
    for source, how in ((tmp_path / "bin", {}), (checkpoint(name), sharded), (tmp_path / "bin", {"dtype": "float32"})):
        how |= {"method": "mean", "checksums": True, "overwrite": True}
        found = all_tensors(convert_checkpoint(source, 1, tmp_path / "out", **how).out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_stays_is_moved_as_bytes(checkpoint: Callable[[str], Path]) -> None:
    """Embeddings and all that is only renamed are copied from their files, not read into memory."""
    plan = plan_conversion(checkpoint("gpt_neox+rotary"), 2, method="mean")
    ranges = {t.name for t in plan.tensors if not t.change and plan.checkpoint.has_range(t.sources[0])}
    moved = {"q_proj", "k_proj", "v_proj"}
    assert ranges == {t.name for t in plan.tensors if t.name.split(".")[-2] not in moved}
