"""The method that is taken where none is named: which, why, what is said of it, and what the others would cost."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import MERGED, llama, run, weights
from safetensors.torch import save_file
from test_families import write_checkpoint
from tiny_models import TINY, build

from gqa.checkpoint.errors import RefusedError
from gqa.convert import estimate
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.heads.family import Symmetry
from gqa.convert.heads.modules import attention_modules, can_guess_inputs
from gqa.convert.methods import AUTOMATIC, METHODS

# Of tiny models: what layers are given can be guessed, or not, or heads cannot be aligned at all.
TAKEN = {
    "llama": "aligned", "qwen3": "aligned", "phi": "aligned", "starcoder2": "aligned", "gemma": "aligned",
    "gemma2": "aligned", "olmo2": "aligned", "mixtral": "procrustes", "falcon_h1": "procrustes",
    "qwen3_next": "mean", "bitnet": "mean",
}  # fmt: skip


def tiny(name: str, place: Path) -> Path:
    return write_checkpoint(build(TINY[name], 4), place)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_follows_from_the_layers(name: str, tmp_path: Path) -> None:
    plan = plan_conversion(tiny(name, tmp_path / "m"), 2)
    symmetry = plan.config.symmetry
    assert plan.method == TAKEN[name]
    assert plan.method in AUTOMATIC
    modules = attention_modules(plan.checkpoint, plan.config)
    assert can_guess_inputs(plan.checkpoint, plan.config, modules) == METHODS[plan.method].guesses
    if isinstance(symmetry, Symmetry):
        assert not plan.warnings
    else:
        assert plan.warnings == (f"the result needs training before it is of use: {plan.why}, so their mean is taken",)
        assert symmetry in plan.why


def test_a_layer_unlike_the_others_ends_the_guess(tmp_path: Path) -> None:
    """The control: a matrix or a norm too many in the last layer, and what it is given later is not known."""
    model = llama(tmp_path / "m", shards=1)
    assert plan_conversion(model, 2).method == "aligned"
    for name, tensor in (("mlp.experts", torch.zeros(4, 32)), ("other_layernorm", torch.ones(32))):
        more = weights() | {f"model.layers.1.{name}.weight": tensor}
        save_file(more, model / "model.safetensors", metadata={"format": "pt"})
        assert plan_conversion(model, 2).method == "procrustes"


def test_the_result_is_that_of_the_method_and_says_so(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    done = run("--groups", 2, model)
    lines = done.said.splitlines()
    assert lines[0] == "method      aligned (--method auto): what its layers are given can be guessed from the weights"
    assert lines[-1] == "next        --method refined (minutes a layer): calibrated, then trained layer by layer"
    named = convert_checkpoint(model, 2, tmp_path / "named", method="aligned").out
    record, other = (
        json.loads((out / "gqa_conversion.json").read_text()) | {"created": "", "argv": []}
        for out in (tmp_path / "m-gqa2-aligned", named)
    )
    options, given = record.pop("options"), other.pop("options")
    assert record == other
    assert given == options | {"method": "aligned", "output": "named"}
    assert convert_checkpoint(model, 1).out == tmp_path / "m-mqa-aligned", "the default of Python too"


def test_nothing_is_advised_for_a_model_that_predicts_no_tokens(tmp_path: Path) -> None:
    """It can be neither trained nor evaluated as a language model; the control with its head is above."""
    tensors = {name: tensor for name, tensor in weights().items() if not name.startswith("lm_head")}
    said = run(*MERGED, llama(tmp_path / "m", tensors=tensors, architectures=["LlamaModel"])).out
    assert "written     " in said
    assert not {"next", "gqa-uptrain"} & {*said.split()}


def test_nothing_is_chosen_where_nothing_is_merged(tmp_path: Path) -> None:
    plan = plan_conversion(tiny("bitnet", tmp_path / "m"), 4)
    assert (plan.why, plan.method, plan.warnings) == ("", "none", ())
    assert "--method" not in run("--groups", 8, "--dry-run", llama(tmp_path / "l")).out


def test_options_of_what_auto_may_be(tmp_path: Path) -> None:
    model = llama(tmp_path / "m")
    assert run("--groups", 2, "--grouping", "search", "--dry-run", model).code == 0
    said = run("--groups", 2, "--data", "text", "--dry-run", model).err
    assert "--data is not used by --method auto; it goes with --method calibrated, refined" in said
    with pytest.raises(RefusedError, match="method: 'best' is not one of 'auto', 'mean', 'first'"):
        plan_conversion(model, 2, method="best")


def test_a_dry_run_estimates_every_method_that_the_model_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading a weight: there is none in the file."""
    monkeypatch.setattr(estimate, "measure_flops", lambda device, width: 1e6)
    model = llama(tmp_path / "m", shards=1)

    def estimates(*words: object) -> dict[str, dict[str, float]]:
        done = run("--groups", 2, "--dry-run", "--json", *words)
        assert done.err.count("estimate    ") == (0 if "-q" in words else len(json.loads(done.out)["estimates"]))
        return dict(json.loads(done.out)["estimates"])

    before = estimates(model)
    assert list(before) == ["mean", "first", "procrustes", "aligned", "calibrated", "refined"]
    for name in ("seconds", "memory_bytes"):
        values = [before[method][name] for method in ("mean", "aligned", "calibrated", "refined")]
        assert values == sorted(set(values))
    assert list(estimates(tiny("bitnet", tmp_path / "d"))) == ["mean", "first", "refined"]
    monkeypatch.setattr(estimate, "measure_flops", lambda device, width: 2e6)
    assert estimates("-q", model)["refined"]["seconds"] == pytest.approx(before["refined"]["seconds"] / 2, rel=0.01)
