"""Options of a training: defaults (teacher, text, output), rates, what decays, what does not go
together, repeats.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from support.checkpoints import Result, edit_json, run
from support.documents import open_data
from support.patches import log_every_line, use_data_cache
from support.tiny_models import TINY, build
from support.training import (
    converted_beside_base,
    load,
    material,
    options_for,
    pair_material,
    tiny_checkpoint,
    training_model,
)

from gqa.checkpoint.read import Checkpoint, read_checkpoint
from gqa.convert.api import convert_checkpoint
from gqa.core.errors import CacheError, RefusedError
from gqa.models.classes import read_auto_config
from gqa.models.tokenizer import load_tokenizer
from gqa.uptrain.advice import _baseline, lower_rate, more_tokens
from gqa.uptrain.defaults import DEFAULT_TOKENS, decide_defaults
from gqa.uptrain.optimizer import make_optimizer
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.run_length import decide_block_and_batch
from gqa.uptrain.schedule import Schedule, rate_factor, warmup_steps
from gqa.uptrain.setup import prepare
from gqa.uptrain.state_files import TrainingProgress

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Next to its base model."""
    return converted_beside_base(tmp_path)


def settled(model: Path, **given: Any) -> tuple[UptrainOptions, str]:
    options, _, teacher_text = decide_defaults(
        UptrainOptions(str(model), Path("out"), **given),
        read_checkpoint(model),
        read_auto_config(str(model)),
    )
    return options, teacher_text


def uptrain(*words: object) -> Result:
    return run(*map(str, words), program="gqa-uptrain")


def test_no_options(
    converted: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But how much: the base model teaches, on what it writes,
    and the result is beside the model.
    """
    # The tests of a process share a cache, in which another one may have generated the same text.
    use_data_cache(monkeypatch, tmp_path_factory.mktemp("cache-without-text"))
    log_every_line(monkeypatch)
    refused = uptrain(converted, "--alpha", 0.1)
    assert "--alpha needs data of known length, which --data self does not have" in refused.err
    done = uptrain(converted, "--steps", 2, "--batch-size", 2, "--validation-tokens", 128)
    assert done.code == 0, done.err
    assert re.search(
        r"^base writes: (\S+) of \1 tokens, \S+ elapsed, about 00:00 left\n", done.err, re.MULTILINE
    )
    lines = {line[:10].rstrip(): line[12:] for line in done.said.splitlines()}
    assert (
        lines["teacher"]
        == f"{tmp_path / 'base'}, the base model (--teacher none: train on text alone)"
    )
    assert lines["data"] == "self: 4 blocks of 64 tokens from base"
    assert lines["validation"].startswith("KL divergence from the teacher 0."), "before and after"
    record = json.loads((tmp_path / "converted-uptrained" / "gqa_uptraining.json").read_text())
    assert record["teacher"] == "base"
    assert record["data"] == ["self"]
    assert record["tokens"] == 256
    losses = record["losses"]
    assert 0 < losses["distillation_before"] < losses["validation_before"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "base",
        "converted",
        "converted-uptrained",
    ]
    convert_checkpoint(tmp_path / "base", 1, tmp_path / "smaller", method="mean")
    again = uptrain(
        tmp_path / "smaller", "--steps", 3, "--batch-size", 2, "--validation-tokens", 128
    )
    again.expect()
    assert "base writes" not in again.err, "samples are kept for every model with this base"


def test_places_of_the_base_model(converted: Path, tmp_path: Path) -> None:
    """Where it was when it was converted, or beside the result by its name."""
    base = str(tmp_path / "base")
    assert settled(converted)[0].teacher == base
    (tmp_path / "deep").mkdir()
    moved = shutil.copytree(converted, tmp_path / "deep" / "moved")
    assert settled(moved, data=("text",))[0].teacher == "none"
    edit_json(
        moved / "gqa_conversion.json", lambda record: record["source"].update(path="../../base")
    )
    assert settled(moved)[0].teacher == base
    edit_json(moved / "gqa_conversion.json", lambda record: record["source"].update(path=None))
    shutil.copytree(base, tmp_path / "deep" / "base")
    assert settled(moved)[0].teacher == str(tmp_path / "deep" / "base")
    assert settled(moved, teacher="none", data=("text",))[0].teacher == "none"
    assert settled(moved, teacher=base)[0].teacher == base
    # Of a training in another directory, beside another model of that name.
    assert (
        uptrain(
            converted, "--steps", 1, "--batch-size", 1, "-o", tmp_path / "deep" / "trained"
        ).code
        == 0
    )
    assert settled(tmp_path / "deep" / "trained")[0].teacher == base


@pytest.mark.parametrize(
    "record", ["[1]", '"x"', '{"options": null}', '{"source": "x"}', '{"source": {"model": 1}}']
)
def test_a_record_that_says_nothing(converted: Path, record: str) -> None:
    (converted / "gqa_conversion.json").write_text(record)
    assert settled(converted, data=("text",))[0].teacher == "none"
    assert settled(converted, teacher="none", data=("text",))[0].train == "all"


def test_a_model_that_is_no_conversion(tmp_path: Path) -> None:
    """What to do is said, in place of the absence of a teacher."""
    model = tiny_checkpoint(tmp_path / "base")
    done = uptrain(model, "--steps", 1)
    done.expect(2, out="", err_lines=1)
    assert "base is not a converted model (no gqa_conversion.json); run gqa-convert" in done.err


def test_a_base_model_that_is_not_there(converted: Path, tmp_path: Path) -> None:
    """Text is then needed; with it the run goes on without a teacher and says so."""
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    done = uptrain(converted, "--steps", 1)
    missing = "the base model base was moved or deleted; pass it with --teacher"
    done.expect(2, out="", err_lines=1)
    assert (
        f"no --data was passed, and there is no teacher to generate the text ({missing}); pass "
        "text with --data, or" in done.err
    )
    done = uptrain(converted, "--steps", 1, "--batch-size", 2, "--data", material() / "data.jsonl")
    assert done.code == 0, done.err
    assert f"no teacher  {missing}" in done.said
    record = json.loads((tmp_path / "converted-uptrained" / "gqa_uptraining.json").read_text())
    assert record["teacher"] is None


def test_a_hub_base_model(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came from the hub is read there, at the commit that was converted, also by its name;
    out of reach it is as if it were not there. The output names the commit of any other model id.
    """
    source = {"model": "lab/base", "revision": "abc"}
    edit_json(converted / "gqa_conversion.json", lambda record: record.update(source=source))

    def open_model(name: str, revision: str | None, headers_only: bool) -> Checkpoint:
        assert headers_only  # the weights are fetched once everything is checked
        return replace(
            read_checkpoint(material() / "teacher"),
            hub_id=name,
            revision=revision or "main's commit",
        )

    # A hub that has every model
    monkeypatch.setattr("gqa.uptrain.defaults.open_model", open_model)
    assert (
        settled(converted)[1]
        == "lab/base at commit abc, the base model (--teacher none: train on text alone)"
    )
    assert settled(converted, teacher="lab/base")[1] == "lab/base at commit abc"
    assert settled(converted, teacher="lab/other")[1] == "lab/other at commit main's commi"

    def unreachable(name: str, *given: object, **named: object) -> None:
        raise RefusedError(f"{name} is out of reach")

    # A hub that cannot be reached
    monkeypatch.setattr("gqa.uptrain.defaults.open_model", unreachable)
    options, message = settled(converted, data=("text",))
    assert options.teacher == "none"
    assert message == "the base model lab/base cannot be read: lab/base is out of reach"


def test_a_base_model_that_cannot_be_read_is_warned_of(
    converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is then trained on text alone, which nobody asked for."""
    shutil.rmtree(converted.with_name("base"))
    settled(converted, data=("text",))
    warned = capsys.readouterr().err
    assert "warning: there is no teacher (the base model base was moved or deleted" in warned

    settled(converted, data=("text",), teacher="none")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("teacher", ["lab/base", "none"])
def test_the_result_is_compared_with_the_revision_that_was_converted(
    converted: Path, teacher: str
) -> None:
    """Of a base model at the hub, if the user named one; also of a training on text alone."""

    def baseline(**given: Any) -> tuple[str, str | None]:
        options = UptrainOptions(str(converted), Path("out"), data=("text",), **given)
        return _baseline(SimpleNamespace(options=options, checkpoint=read_checkpoint(converted)))  # type: ignore[arg-type]

    local, _ = baseline(teacher="none")
    assert Path(local) == converted.with_name("base")
    assert baseline(teacher="lab/other") == ("lab/other", None)

    record = {"source": {"model": "lab/base", "revision": "abc"}, "options": {"revision": "v1"}}
    edit_json(converted / "gqa_conversion.json", lambda old: old | record)
    assert baseline(teacher=teacher) == ("lab/base", "v1")


def test_a_full_disk_is_not_a_missing_base_model(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*given: object, **named: object) -> None:
        raise CacheError("the cache cannot be written")

    monkeypatch.setattr("gqa.uptrain.defaults.open_model", full_disk)
    with pytest.raises(CacheError):
        settled(converted, data=("text",))


def test_a_directory_with_the_name_of_a_hub_model(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """May be any model: it is not the base model, though it is beside the result."""
    source = {"model": "base", "revision": "abc"}
    edit_json(converted / "gqa_conversion.json", lambda record: record.update(source=source))
    assert converted.with_name("base").is_dir()
    opened = list[tuple[str, str | None]]()

    def open_model(name: str, revision: str | None, headers_only: bool) -> Checkpoint:
        opened.append((name, revision))
        return read_checkpoint(material() / "teacher")

    monkeypatch.setattr("gqa.uptrain.defaults.open_model", open_model)
    settled(converted)
    assert opened == [("base", "abc")]


def test_an_encoder_decoder_by_the_default_of_its_class(tmp_path: Path) -> None:
    """Its config.json need not say what it is; pairs do not repeat."""
    for name in ("t5-base", "t5"):
        shutil.copytree(pair_material() / name, tmp_path / name)
    config = tmp_path / "t5" / "config.json"
    edit_json(config, lambda entries: entries.__delitem__("is_encoder_decoder"))
    found, _ = settled(tmp_path / "t5", data=("text",))
    assert found.teacher == str(tmp_path / "t5-base")
    assert found.repeats is False


def test_a_teacher_with_another_tokenizer_is_refused_before_weights_are_read(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_weights(*given: object) -> None:
        raise AssertionError("weights are read")

    def rename_tokens(content: Any) -> None:
        vocab = {f"{token}x": number for token, number in content["model"]["vocab"].items()}
        content["model"] |= {"vocab": vocab, "merges": []}

    edit_json(tmp_path / "base" / "tokenizer.json", rename_tokens)
    monkeypatch.setattr("gqa.uptrain.setup.load_trained_model", read_weights)
    monkeypatch.setattr("gqa.uptrain.setup.load_teacher", read_weights)
    with pytest.raises(
        RefusedError, match="the teacher base has a different tokenizer from the model"
    ):
        prepare(options_for(converted, tmp_path / "out"))


def test_length_and_scope(converted: Path) -> None:
    found, _ = settled(converted)
    assert found.data == ("self",)
    assert found.tokens == DEFAULT_TOKENS
    assert found.train == "all"
    for given in ({"steps": 3}, {"alpha": 0.1, "data": ("text",)}, {"data": ("self:1k",)}):
        assert settled(converted, **given)[0].tokens is None
    edit_json(
        converted / "gqa_conversion.json", lambda record: record["options"].update(method="refined")
    )
    assert settled(converted)[0].train == "attention"
    assert settled(converted, train="kv")[0].train == "kv"
    given: dict[str, Any]
    for given, repeats in (
        ({}, True),
        ({"teacher": "none"}, False),
        ({"teacher": "none", "repeats": True}, True),
        ({"repeats": False}, False),
    ):
        assert settled(converted, data=("text",), **given)[0].repeats is repeats


def test_the_best_state_is_what_comes_out_at_a_rate_that_ruins(
    converted: Path, tmp_path: Path
) -> None:
    """The weights of before, bit for bit, and it says so; at a sensible rate the teacher comes
    nearer.
    """
    words = (converted, "--steps", 3, "--batch-size", 2, "--warmup", 0, "--validation-tokens", 128)
    done = uptrain(*words, "--learning-rate", 1, "-o", tmp_path / "ruined")
    assert done.code == 0, done.err
    assert (
        "unchanged   no step lowered the KL divergence from the teacher: the weights are those of "
        "converted (the learning rate was 1)\n" in done.out
    )
    record = json.loads((tmp_path / "ruined" / "gqa_uptraining.json").read_text())
    assert done.out.endswith(
        "\nnext        repeat the command with --overwrite --learning-rate 0.1; if that does not "
        f"help, with --overwrite --tokens {10 * record['tokens']} instead of --steps\n"
    )
    files = sorted(path.name for path in converted.glob("*.safetensors"))
    assert files
    assert all(
        (converted / name).read_bytes() == (tmp_path / "ruined" / name).read_bytes()
        for name in files
    )
    card = (tmp_path / "ruined" / "README.md").read_text()
    assert "lowered the KL divergence from the teacher on validation text: the weights are" in card
    done = uptrain(*words, "--learning-rate", 1e-3, "-o", tmp_path / "better")
    losses = json.loads((tmp_path / "better" / "gqa_uptraining.json").read_text())["losses"]
    assert losses["distillation_after"] < losses["distillation_before"]
    assert losses["best_step"] > 0
    assert "unchanged" not in done.out
    assert "\nnext        measure it: " in done.out
    before, after = load(converted), load(tmp_path / "better")
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": ("text",), "steps": 3}, "--tokens 1280 instead of --steps"),
        ({"data": ("self:1K",)}, "--data self:1280 instead of --data self:1K"),
        ({"data": ("self:plain:1K",)}, "--data self:plain:1280 instead of --data self:plain:1K"),
        (
            {"data": ("self:1K",), "tokens": 128},
            "--data self:1280 --tokens 1280 instead of --data self:1K",
        ),
        # The text suffices
        ({"data": ("self:1M",), "tokens": 128}, "--tokens 1280"),
    ],
)
def test_what_trains_on_more_tokens(given: dict[str, Any], says: str) -> None:
    """Ten times as many, in the way in which the number was given."""
    assert more_tokens(UptrainOptions("model", **given), TrainingProgress(tokens=128)) == says


@pytest.mark.parametrize(
    ("given", "says"),
    [({}, "0.03%"), ({"learning_rate": "1%"}, "0.1%"), ({"learning_rate": 1e-4}, "1e-05")],
)
def test_a_lower_rate_is_typed_as_the_given_one(given: dict[str, Any], says: str) -> None:
    assert lower_rate(UptrainOptions("model", **given)) == says


@pytest.mark.parametrize(
    ("changes", "have", "ranks", "block", "batch"),
    [
        ({"tokens": 10_000_000}, 2**40, 1, 1024, 8),
        ({"tokens": 512_000}, 2**40, 1, 1024, 2),
        ({"alpha": 0.01}, 2_669_449, 1, 256, 1),
        ({"alpha": 0.01, "context": 512}, 2_669_449, 1, 512, 1),
        ({"tokens": 512_000, "micro_batch": 3}, 2**40, 2, 1024, 6),
        ({"steps": 10}, 2**40, 16, 1024, 16),
        ({"alpha": 0.01, "schedule": "constant"}, 2_669_449, 1, 1024, 8),
    ],
)
def test_a_short_run_has_steps_all_the_same(
    changes: dict[str, Any], have: int, ranks: int, block: int, batch: int
) -> None:
    found = decide_block_and_batch(UptrainOptions("m", Path("out"), **changes), have, 1024, ranks)
    assert found.context == block
    assert found.batch_size == batch
    found.check(ranks)


HALF = 0.5 * (1 + math.cos(math.pi / 4)), 0.5 * (1 + math.cos(3 * math.pi / 4))


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1.0] * 6),
        ("constant", 3, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [1 / 3, 2 / 3, 1, HALF[0], 0.5, HALF[1]]),
        ("linear", 9, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        *(
            (schedule, warmup, [rate])
            for schedule in get_args(Schedule)
            for warmup, rate in ((0, 1), (1, 0.5))
        ),
    ],
)
def test_rates_by_hand(schedule: Schedule, warmup: int, expected: list[float]) -> None:
    steps = len(expected)
    assert [rate_factor(step, steps, schedule, warmup) for step in range(steps)] == pytest.approx(
        expected
    )


def test_warmup_by_default() -> None:
    assert [warmup_steps(None, "cosine", steps) for steps in (19, 20, 1000, 5000)] == [
        0,
        1,
        50,
        100,
    ]
    assert warmup_steps(None, "constant", 5000) == 0
    assert {warmup_steps(7, schedule, 5000) for schedule in get_args(Schedule)} == {7}


@pytest.mark.parametrize("name", ["llama+bias", "gemma2", "cohere+qk_norm", "mixtral"])
def test_norms_and_biases_do_not_decay(name: str) -> None:
    """Cohere's norms of heads are matrices, and experts are three-dimensional.

    What is frozen is in no group.
    """
    model = training_model(build(TINY[name], 2))
    same_rate = options(learning_rate=1e-3)
    groups = make_optimizer(model, same_rate).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for name, parameter in model.named_parameters():
        vector = "norm" in name or name.endswith("bias")
        assert [any(p is parameter for p in group["params"]) for group in groups] == [
            not vector,
            vector,
        ], name
    model.requires_grad_(False)
    head = model.model.lm_head.weight.requires_grad_(True)
    assert [
        list(map(id, group["params"])) for group in make_optimizer(model, same_rate).param_groups
    ] == [[id(head)]]


def options(**given: Any) -> UptrainOptions:
    return UptrainOptions("model", Path("out"), **{"steps": 3} | given)


@pytest.mark.parametrize(
    ("given", "ranks", "says"),
    [
        (
            {"alpha": 0.1},
            1,
            "--alpha and --steps cannot be combined, because each sets the length; pass one of "
            "--alpha, --tokens and --steps",
        ),
        ({"batch_size": 6}, 4, "--batch-size 6 is not a multiple of the 4 processes"),
        (
            {"batch_size": 8, "micro_batch": 3},
            2,
            "--micro-batch 3 does not divide the 4 blocks that each process has in a step; pass a "
            "divisor, like 1",
        ),
        # At once, however many divisors there may be
        (
            {"batch_size": 10**9, "micro_batch": 6},
            1,
            "--micro-batch 6 does not divide the 1000000000 blocks that each process has in a "
            "step; pass a divisor, like 2",
        ),
        (
            {"validation": "a", "validation_fraction": 0.1},
            1,
            "--validation and --validation-fraction cannot be combined",
        ),
        ({"data": ("self", "a")}, 1, "because self cannot be combined with other sources"),
        (
            {"data": ("self",), "streaming": True},
            1,
            "--streaming needs text of your own, but the teacher generates the text",
        ),
        (
            {"data": ("self",), "validation_fraction": 0.1},
            1,
            "--validation-fraction needs text of your own, but the teacher generates the text",
        ),
        ({"data": ("self",), "teacher": "none"}, 1, "--data self is generated by the teacher"),
        (
            {"data": ("self",), "alpha": 0.1, "steps": None},
            1,
            "of known length, which --data self does not have",
        ),
        (
            {"streaming": True, "alpha": 0.1, "steps": None},
            1,
            "--alpha needs data of known length, not a stream",
        ),
        (
            {"streaming": True, "data": ("a", "b")},
            1,
            "--streaming reads only one source; pass all files as one",
        ),
        (
            {"streaming": True, "validation_fraction": 0.1},
            1,
            "--validation-fraction cannot be used with a stream",
        ),
        ({"train": "all", "lora_rank": 8}, 1, "lora_rank needs --train lora"),
        ({"data": ("self",), "repeats": False}, 1, "repeats needs text of your own"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], ranks: int, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        options(**given).check(ranks)
    options(validation="a", validation_tokens=9, batch_size=8, micro_batch=2).check(2)


@pytest.mark.parametrize("streaming", [False, True])
def test_half_of_the_blocks_repeat_themselves(streaming: bool) -> None:
    """The others stay as they are; what is held out does."""
    options = options_for(steps=8, seed=3, streaming=streaming, validation_tokens=640)
    tokenizer = load_tokenizer(read_checkpoint(material() / "model"))
    plain, mixed = (
        open_data(replace(options, repeats=repeats), tokenizer, 64) for repeats in (False, True)
    )
    unrepeated = {tuple(plain.block(number)["input_ids"].tolist()) for number in range(16)}
    assert (
        5
        <= sum(
            tuple(mixed.block(number)["input_ids"].tolist()) in unrepeated for number in range(16)
        )
        <= 11
    )
    assert all(
        (a["input_ids"] == b["input_ids"]).all()
        for a, b in zip(plain.validation_blocks, mixed.validation_blocks, strict=True)
    )
    assert (len(mixed.validation_blocks) >= 5) is not streaming


@pytest.mark.parametrize("streaming", [False, True])
def test_blocks_in_which_no_passage_fits_twice_repeat_none(streaming: bool) -> None:
    tokenizer = load_tokenizer(read_checkpoint(material() / "model"))
    loader = open_data(
        options_for(steps=8, streaming=streaming, repeats=True, context=24), tokenizer, 64
    )
    assert loader.options.repeats is False
