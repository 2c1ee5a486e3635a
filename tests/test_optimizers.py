"""Muon for matrices and AdamW for the rest, as one optimiser; and text that repeats itself while training."""

from __future__ import annotations

import shutil
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY, build
from training import Runs, losses, material, options_for, state_weights, training_model

from gqa.checkpoint.read import read_checkpoint
from gqa.checkpoint.tokenizers import load_tokenizer
from gqa.uptrain.dataloader import Dataloader, open_dataloader
from gqa.uptrain.optimizer import MuonAdamW, make_optimizer, on_host, plain_moments
from gqa.uptrain.summary import memory_bytes

RATE, DECAY = 1e-2, 0.1


def model_and_optimizer() -> tuple[Any, MuonAdamW]:
    torch.manual_seed(0)
    model = training_model(build(TINY["llama"], 2), optimizer="muon", learning_rate=RATE, weight_decay=DECAY)
    found = make_optimizer(model, options_for(optimizer="muon", learning_rate=RATE, weight_decay=DECAY))
    assert isinstance(found, MuonAdamW)
    return model, found


def steps(model: Any, optimizers: list[Any], numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATE / (number + 1)
            optimizer.step()


def test_it_is_the_two_of_torch() -> None:
    """Matrices of the layers take Muon's steps; embeddings, the head and vectors AdamW's."""
    one, own = model_and_optimizer()
    two, _ = model_and_optimizer()
    parameters = dict(two.model.named_parameters())
    tables = {name: p for name, p in parameters.items() if "embed_tokens" in name or "lm_head" in name}
    matrices = {name: p for name, p in parameters.items() if p.ndim == 2 and name not in tables}
    vectors = [p for name, p in parameters.items() if name not in tables and name not in matrices]
    assert len(tables) == 2
    assert len(matrices) == 2 * 7
    muon = torch.optim.Muon(matrices.values(), lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    decays = [{"params": [*tables.values()], "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    steps(one, [own], range(3))
    steps(two, [muon, torch.optim.AdamW(decays, lr=RATE, betas=(0.9, 0.95))], range(3))
    assert all(torch.equal(p, parameters[name]) for name, p in one.model.named_parameters())


def test_a_loaded_state_goes_on() -> None:
    one, own = model_and_optimizer()
    steps(one, [own], range(2))
    two, other = model_and_optimizer()
    two.load_state_dict(one.state_dict())
    other.load_state_dict(deepcopy(own.state_dict()))
    fresh, unloaded = model_and_optimizer()
    fresh.load_state_dict(one.state_dict())
    for model, optimizer in ((one, own), (two, other), (fresh, unloaded)):
        steps(model, [optimizer], range(2, 4))
    of_fresh = dict(fresh.named_parameters())
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, of_fresh[name]), name


def test_shards_are_refused(runs: Runs, tmp_path: Path) -> None:
    for name, told in (
        ("muon", "needs whole matrices, and FSDP divides them; use adamw"),
        ("adafactor", "does not go with FSDP2, which divides weights; use adamw"),
    ):
        done = runs.run(*runs.words(tmp_path / "out", steps=1, optimizer=name), before="shard()")
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert f"--optimizer {name} {told}" in done.err


LESS: dict[str, dict[str, Any]] = {
    "8 bits": {"optimizer": "adamw-8bit"},
    "bfloat16": {"weights": "bfloat16", "precision": "bf16"},
    "both": {"optimizer": "adamw-8bit", "weights": "bfloat16"},
}


@pytest.mark.parametrize("name", LESS)
def test_less_memory_for_nearly_the_same_losses(runs: Runs, tmp_path: Path, name: str) -> None:
    """Also in shards, and continued from whole weights in shards."""
    pytest.importorskip(
        "torchao", reason="the dev extra leaves torchao out: transformers says on stderr that it is there"
    )
    words = {"steps": 4, "save_every": 2, "keep_state": True, "learning_rate": 1e-2}
    runs.finish(*runs.words(tmp_path / "plain", **words))
    expected = losses(tmp_path / "plain")
    assert expected[-1] < 0.98 * expected[0]
    killed = runs.run(*runs.words(tmp_path / "one", **words | LESS[name]), before="kill_at(3)")
    assert killed.code == -signal.SIGKILL, killed.err
    shutil.copytree(tmp_path / "one-state", tmp_path / "shards-state")
    runs.finish(*runs.words(tmp_path / "one", **words | LESS[name]), "--resume")
    runs.finish(*runs.words(tmp_path / "shards", **words | LESS[name]), "--resume", ranks=2, before="shard()")
    for out in ("one", "shards"):
        assert losses(tmp_path / out) == pytest.approx(expected, rel=5e-3), out
    held = state_weights(tmp_path / "one-state" / "step-00000004").values()
    assert {tensor.dtype for tensor in held} == {torch.bfloat16 if "weights" in LESS[name] else torch.float32}


def test_moments_leave_the_device_one_after_the_other() -> None:
    """Of 8 bits each is in the host's memory before the next is float32; what trains goes on does not change a copy."""
    done: list[str] = []

    class Whole(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            done.append("on the host")
            return self.as_subclass(torch.Tensor)

    class EightBits(torch.Tensor):
        __module__ = "torchao.optim"

        def dequantize(self, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
            done.append("float32")
            return torch.ones(4, dtype=dtype).as_subclass(Whole)

    moments = {name: torch.zeros(4, dtype=torch.uint8).as_subclass(EightBits) for name in ("exp_avg", "exp_avg_sq")}
    state = {"state": {"weight": {**moments, "step": torch.ones(1)}}, "param_groups": [{"lr": 1e-3}]}
    for copied in (True, False):
        done.clear()
        found = on_host(state) if copied else plain_moments(state)
        assert done == 2 * ["float32", "on the host"]
        own = found["state"]["weight"]
        assert {key: (type(value), value.dtype) for key, value in own.items()} == dict.fromkeys(
            own, (torch.Tensor, torch.float32)
        )
        assert (own["step"] is not state["state"]["weight"]["step"]) == copied
        assert found["param_groups"] == state["param_groups"]


def test_steps_smaller_than_bfloat16_shows_add_up() -> None:
    """On average; those rounded to the nearest change nothing."""
    optim = pytest.importorskip("torchao.optim", reason="as above")
    for at_random in (True, False):
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
        optimizer = optim._AdamW([weights], lr=1e-4, weight_decay=0, bf16_stochastic_round=at_random)
        for _ in range(10):
            weights.grad = torch.ones_like(weights)
            optimizer.step()
        drift = float(weights.detach().double().mean() - 1)
        assert drift == (pytest.approx(-1e-3, rel=0.1) if at_random else 0)


def test_bytes_of_a_parameter() -> None:
    for given, each in (
        (("adamw",), 16), (("adamw-8bit",), 10), (("muon",), 12), (("adafactor",), 9),
        (("adamw", 0, 1, "bfloat16"), 8), (("adamw-8bit", 0, 1, "bfloat16"), 6),
    ):  # fmt: skip
        assert memory_bytes(100, 100, *given) == 100 * each, given


def opened(**given: Any) -> Dataloader:
    options = replace(options_for(steps=8, batch_size=2, seed=3), **given)
    return open_dataloader(options, load_tokenizer(read_checkpoint(material() / "model")), 64)


def batches(loader: Dataloader, first: int = 0, rank: int = 0, ranks: int = 1) -> list[Any]:
    return [micro["input_ids"].numpy() for step in loader.batches(first, rank, ranks, 2) for micro in step]


@pytest.mark.parametrize("streaming", [False, True])
def test_half_of_the_blocks_repeat_themselves(streaming: bool) -> None:
    """The others stay as they are; what is held out does; and every rank and every continued run reads the same."""
    given = {"streaming": streaming, "heldout_tokens": 640}
    plain, mixed = opened(**given), opened(**given, repeats=True)
    before, after = (np.concatenate(batches(loader)) for loader in (plain, mixed))
    same = (before == after).all(1)
    assert 5 <= same.sum() <= 11
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(plain.heldout, mixed.heldout, strict=True))
    assert len(mixed.heldout) >= 5
    assert np.array_equal(np.concatenate(batches(mixed, 5)), after[10:])
    ranks = [np.concatenate(batches(mixed, 0, rank, 2)) for rank in range(2)]
    assert np.array_equal(np.stack(ranks, 1).reshape(-1, 64), after)
