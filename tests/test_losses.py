"""The loss and its gradient against the plain computation on whole logits, and against
transformers' own loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.loss_oracles import VOCABULARY, assert_equals, gradients, set_slices
from support.tiny_models import TINY, build
from support.training import training_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel

from gqa.corpus.likelihood import nats
from gqa.models.chunked_head import ChunkedHead
from gqa.uptrain.training_model import chunked_sum

# Tied, with a bias in the head (Phi), soft-capped (Gemma 2), scaled (Cohere, Granite), mixtures,
# inside a larger model.
HEADS = [
    "llama+tied",
    "phi",
    "gemma2",
    "cohere",
    "granite",
    "mixtral",
    "falcon",
    "gemma3",
    "gpt_oss",
    "phi3",
    "olmo2",
]


def batch(rows: int = 3, length: int = 33, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(10, 60, (rows, length), generator=generator)}


def made(name: str = "llama", **options: Any) -> PreTrainedModel:
    return build(TINY[name], 2, **options).train()


def pair(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and its teacher."""
    return made(name), build(TINY[name], 2, seed=1).eval()


@pytest.mark.parametrize("name", HEADS)
def test_equals_the_loss_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(name), batch()
    assert_equals(
        monkeypatch, model(**given, labels=given["input_ids"], use_cache=False).loss, model, given
    )


def test_distillation_equals_that_on_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, teacher), given = pair("gemma2"), batch()
    ids = given["input_ids"]
    student = model(ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    with torch.no_grad():
        theirs = teacher(ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    p, q = theirs.softmax(-1), student.log_softmax(-1)
    divergence = (p * (p.log() - q)).sum(-1).mean()
    likelihood = cross_entropy(student, ids[:, 1:].flatten())
    assert_equals(monkeypatch, divergence, model, given, teacher=teacher)
    assert not gradients(teacher)
    _, told = training_model(model, teacher)(**given)
    assert float(told[1] / told[0]) == pytest.approx(float(likelihood), abs=1e-5)


def test_the_teacher_is_no_part_of_the_model() -> None:
    model, teacher = pair()
    training = training_model(model, teacher)
    assert {name.removeprefix("model.") for name in training.state_dict()} == set(
        model.state_dict()
    )
    training.train()
    assert not teacher.training
    loss, sums = training(**batch())
    with torch.no_grad():  # held-out text is judged as training is
        unseen, sums_again = training(**batch())
    assert float(unseen) == pytest.approx(float(loss))
    assert sums_again.tolist() == pytest.approx(sums.tolist())


class Widest(TorchDispatchMode):
    """The most rows of width V that any operation makes, forward or backward."""

    rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return output


@pytest.mark.parametrize("taught", [False, True])
def test_nothing_of_width_v_is_held_for_a_batch(
    monkeypatch: pytest.MonkeyPatch, taught: bool
) -> None:
    model, teacher = pair("gemma2")
    training, given = training_model(model, teacher if taught else None), batch(8)
    training(**batch(1))  # the heads are checked on the first input
    matrix = 32  # the gradient of the head is of width V too
    for rows, most in ((16, max(16, matrix)), (100, 100), (999, 8 * 32)):
        set_slices(monkeypatch, rows)
        with Widest() as widest:
            loss, _ = training(**given)
            loss.backward()
        assert widest.rows == most


def head_gradients(dtype: torch.dtype) -> list[Tensor]:
    """Of the mean of nats over 4,000 rows, for rows and weights in this dtype."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 16, generator=generator).to(dtype).requires_grad_()
    weight = nn.Parameter((torch.randn(VOCABULARY, 16, generator=generator) * 0.1).to(dtype))
    targets = torch.randint(VOCABULARY, (4000,), generator=generator)

    def loss(leaf: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
        value = nats((leaf @ weight.T).float(), targets[piece]).sum()
        return value, value.reshape(1)

    total, _ = chunked_sum(loss, VOCABULARY, hidden, [weight])
    return [*torch.autograd.grad(total / len(targets), (hidden, weight))]


def test_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of many slices lose nothing in bfloat16."""
    set_slices(monkeypatch, 16)
    for found, exact in zip(
        head_gradients(torch.bfloat16), head_gradients(torch.float32), strict=True
    ):
        assert found.dtype == torch.bfloat16
        assert float((found - exact).norm() / exact.norm()) < 5e-3


def test_autocast_loses_no_gradient() -> None:
    """The first input is also the one that the head is checked on, without gradients, in the same
    region.
    """
    model = made("llama+tied")
    training, found = training_model(model), []
    for enabled in (True, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, told = training(**batch())
        (loss / told[0]).backward()
        found.append(gradients(model))
    first, second, exact = found
    assert first.keys() == second.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    for name, tensor in exact.items():
        assert float((first[name] - tensor).norm() / tensor.norm()) < 0.1, name


@pytest.mark.parametrize("error", [0.0, 0.05])
def test_a_head_that_is_off_is_not_split(error: float) -> None:
    """A class whose logits depend on its input ids, by less than the largest logit is rounded to in
    bfloat16.
    """

    class Scaled(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, **given: Any) -> Any:
            output = super().forward(input_ids, **given)
            output.logits = output.logits * (1 + error * bool(input_ids.any()))
            return output

    model = Scaled(made().config).bfloat16()
    head = ChunkedHead(model)
    head.hidden(**batch())
    assert head.split == (not error)


@pytest.mark.parametrize(
    ("name", "modules"),
    {
        "llama": {"model"},
        "llama4_text": {""},
        "gqa_t5": {"encoder", "decoder"},
    }.items(),
)
def test_all_that_runs_is_compiled(
    name: str, modules: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also where the head is not split, and where the encoder runs alone."""
    compiled: list[nn.Module] = []
    # Notes what would be compiled
    monkeypatch.setattr(torch, "compile", lambda module: compiled.append(module) or module)
    model, inputs = made(name), batch()
    head = ChunkedHead(model, compile_model=True)
    for _ in range(2):
        head.hidden(
            **inputs, **({"decoder_input_ids": inputs["input_ids"]} if name == "gqa_t5" else {})
        )
    assert sorted(map(id, compiled)) == sorted(id(model.get_submodule(path)) for path in modules)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
