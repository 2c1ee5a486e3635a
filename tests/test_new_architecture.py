"""An architecture is one entry in one file: a Llama under another name."""

from pathlib import Path

import pytest
from scrambled import on_ids, relative, scramble
from test_families import write_checkpoint
from tiny_models import TINY, build, config, inputs, logits
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gqa.checkpoint.errors import RefusedError
from gqa.convert.api import convert_checkpoint
from gqa.convert.heads import config as heads_config
from gqa.convert.heads.family import Family, Rule, Separate, Symmetry

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
    settings = {name: value for name, value in config(tiny, 2).to_dict().items() if name != "model_type"}
    model = NewForCausalLM(NewConfig(**settings)).eval()
    model.load_state_dict(build(tiny, 2).state_dict())
    source, expected = write_checkpoint(model, tmp_path / "source"), logits(tiny, model, inputs(tiny))

    def error_of(out: Path) -> float:
        return relative(logits(tiny, NewForCausalLM.from_pretrained(out), inputs(tiny)), expected)

    with pytest.raises(RefusedError, match="new_llama, which is not supported"):
        convert_checkpoint(source, 4, tmp_path / "four", method="mean")
    monkeypatch.setattr(heads_config, "FAMILIES", (*heads_config.FAMILIES, ENTRY))
    four = convert_checkpoint(source, 4, tmp_path / "four", method="mean").out
    scramble(four)
    assert error_of(four) < 1e-5
    for method in ("mean", "aligned", "calibrated"):
        out = convert_checkpoint(four, 2, tmp_path / method, method=method, calibration=on_ids()).out
        assert (error_of(out) > 0.01) if method == "mean" else (error_of(out) < 1e-4), method
