"""An architecture is one entry in one file: a Llama under another name, with other names for its tensors."""

from pathlib import Path

import pytest
from scrambled import on_ids, relative, scramble
from test_families import write_checkpoint
from tiny_configs import COMMON
from tiny_models import TINY, build, inputs, logits
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from gqa.convert import RefusedError, convert_checkpoint
from gqa.convert.heads import config
from gqa.convert.heads.family import Family, Rule, Separate, Symmetry

ENTRY = Family(
    "wk and wv",
    {"new_llama": Symmetry(query="wq", output="wo", norms=("attention_norm",))},
    attention=("attention",),
    rules=(Rule("wk", Separate("key")), Rule("wv", Separate("value"))),
)


class NewConfig(LlamaConfig):
    model_type = "new_llama"


class NewAttention(LlamaAttention):
    """Its projections are called wq, wk, wv and wo."""

    def __init__(self, config: NewConfig, layer: int) -> None:
        super().__init__(config, layer)
        for letter in "qkvo":
            self.add_module(f"w{letter}", self._modules.pop(f"{letter}_proj"))

    q_proj = property(lambda self: self.wq)
    k_proj = property(lambda self: self.wk)
    v_proj = property(lambda self: self.wv)
    o_proj = property(lambda self: self.wo)


class NewLayer(LlamaDecoderLayer):
    """Its attention and the norm before that are called otherwise."""

    def __init__(self, config: NewConfig, layer: int) -> None:
        super().__init__(config, layer)
        self._modules.pop("self_attn")
        self.attention, self.attention_norm = NewAttention(config, layer), self._modules.pop("input_layernorm")

    self_attn = property(lambda self: self.attention)
    input_layernorm = property(lambda self: self.attention_norm)


class NewForCausalLM(LlamaForCausalLM):
    config_class = NewConfig

    def __init__(self, config: NewConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(NewLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.post_init()


@pytest.fixture
def model() -> PreTrainedModel:
    """Two key/value heads, of a class that only the Auto classes know; the weights of a tiny Llama."""
    AutoConfig.register("new_llama", NewConfig, exist_ok=True)
    AutoModelForCausalLM.register(NewConfig, NewForCausalLM, exist_ok=True)
    kept = {name: value for name, value in COMMON.items() if hasattr(LlamaConfig(), name)}
    made = NewForCausalLM(NewConfig(**kept, num_key_value_heads=2)).eval()
    renamed = {"self_attn.": "attention.", "input_layernorm": "attention_norm"} | {f"{x}_proj": f"w{x}" for x in "qkvo"}
    weights: dict[str, Tensor] = {}
    for name, tensor in build(TINY["llama"], 2).state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        weights[name] = tensor
    made.load_state_dict(weights)
    return made


def test_one_entry_in_one_file_is_enough(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = write_checkpoint(model, tmp_path / "source"), logits(TINY["llama"], model, inputs(TINY["llama"]))

    def error_of(out: Path) -> float:
        return relative(logits(TINY["llama"], NewForCausalLM.from_pretrained(out), inputs(TINY["llama"])), expected)

    with pytest.raises(RefusedError, match="new_llama, which is not supported"):
        convert_checkpoint(source, 4, tmp_path / "four", method="mean")
    monkeypatch.setattr(config, "FAMILIES", (*config.FAMILIES, ENTRY))
    four = convert_checkpoint(source, 4, tmp_path / "four", method="mean").out
    scramble(four)
    assert error_of(four) < 1e-5
    for method in ("mean", "aligned", "calibrated"):
        out = convert_checkpoint(four, 2, tmp_path / method, method=method, calibration=on_ids()).out
        assert (error_of(out) > 0.01) if method == "mean" else (error_of(out) < 1e-4), method
