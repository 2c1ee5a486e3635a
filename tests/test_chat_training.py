"""Chats in training, calibration and evaluation: the same tokens everywhere, and a loss on what the
assistant writes alone, if that is asked for.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chats import (
    CHATML,
    MARKED,
    chat,
    chat_model,
    sharegpt,
    text_of,
    with_template,
    write_chats,
)
from support.checkpoints import check_refused, edit_json, run
from support.embedded import SOURCE, counting
from support.faults import kill_at
from support.patches import use_data_cache
from support.tiny_models import TINY, build
from support.training import Runs, difference, losses, material, training_model

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.calibration_text import CalibrationText
from gqa.core.console import SILENT
from gqa.core.errors import RefusedError
from gqa.corpus.blocks import Blocks, with_repeats
from gqa.corpus.chats import Chat
from gqa.corpus.encoders import Encoders, HarnessEncoder
from gqa.corpus.reading_order import HeldoutDocuments
from gqa.corpus.specs import parse_source
from gqa.corpus.streamed import StreamedBlocks
from gqa.corpus.tokens import tokenize
from gqa.eval.text import document_windows
from gqa.uptrain.dataloader import Dataloader, stack
from gqa.uptrain.options import UptrainOptions
from gqa.uptrain.text_data import TextDataBuilder
from gqa.uptrain.training_model import split_batch
from gqa.uptrain.validation_blocks import has_targets

SIZE = 64
CHATS = [chat(number, turns=1 + number % 3) for number in range(80)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", *CHATS)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use_data_cache(patch, tmp_path_factory.mktemp("cache"))
        yield


def rendered(one: Any) -> list[int]:
    """What transformers makes of a chat."""
    ids = with_template(CHATML).apply_chat_template(one, tokenize=True)["input_ids"]
    return [int(token) for token in ids]


def marks(one: Any) -> list[int]:
    """Which of these tokens the assistant writes, by transformers."""
    settings = {"return_dict": True, "return_assistant_tokens_mask": True}
    mask = with_template(MARKED).apply_chat_template(one, **settings)["assistant_masks"]
    return [int(counts) for counts in mask]


def opened(*data: Path, template: str = CHATML, **given: Any) -> Dataloader:
    options = {"steps": 10, "batch_size": 2, "repeats": False, "assistant_only_loss": True} | given
    options = UptrainOptions("m", Path("o"), data=tuple(map(str, data)), **options)
    encoders = Encoders(
        with_template(template), "m", assistant_only_loss=options.assistant_only_loss
    )
    return TextDataBuilder(options, encoders, SIZE).build()


def joined(loader: Dataloader, key: str) -> list[int]:
    count = loader.steps * loader.options.blocks_per_step
    return [int(value) for number in range(count) for value in loader.block(number)[key]]


def test_chats_are_packed_as_they_are_rendered(chats: Path) -> None:
    """One after the other, whole, with nothing between them; the mask goes with them."""
    loader = opened(chats)
    read = joined(loader, "input_ids")
    mask = joined(loader, "loss_mask")
    known = {tuple(rendered(one)): marks(one) for one in CHATS}

    # Each begins with the one BOS of the template; the last one may be cut.
    starts = [number for number, token in enumerate(read) if token == 1]
    assert starts[0] == 0
    assert len(starts) > 10
    for begin, end in pairwise(starts):
        assert mask[begin:end] == known[tuple(read[begin:end])]
    assert 0 < sum(mask) < len(mask)
    assert "chats longer than a block, and cut there" in loader.summary


@pytest.mark.parametrize("steps", [3, 10, 100], ids=["a part", "half", "several times"])
def test_the_plan_says_how_many_tokens_count_in_the_loss(chats: Path, steps: int) -> None:
    loader = opened(chats, steps=steps)
    mask = joined(loader, "loss_mask")[: loader.distinct_tokens]

    assert f"%), {sum(mask):,} of which count in the loss, in {2 * steps} blocks" in loader.summary
    assert 0 < sum(mask) < len(mask)
    assert "count in the loss" not in opened(chats, assistant_only_loss=False).summary


def test_without_the_option_nothing_is_masked(chats: Path) -> None:
    masked, plain = opened(chats), opened(chats, assistant_only_loss=False)

    assert set(plain.block(0)) == {"input_ids"}
    assert joined(plain, "input_ids") == joined(masked, "input_ids")
    assert len(plain.validation_blocks) == len(masked.validation_blocks) > 0
    assert all(set(block) == {"input_ids"} for block in plain.validation_blocks)
    assert all(set(block) == {"input_ids", "loss_mask"} for block in masked.validation_blocks)
    assert "loss_mask" not in plain.blocks.text.data.column_names


def test_chats_are_held_out_whole(chats: Path) -> None:
    loader = opened(chats, validation_tokens=128)
    held = [token for block in loader.validation_blocks for token in block["input_ids"].tolist()]

    assert held
    first = [one for one in CHATS if rendered(one) == held[: len(rendered(one))]]
    assert len(first) == 1
    trained = joined(loader, "input_ids")
    length = len(rendered(first[0]))
    starts = range(len(trained) - length)
    assert not any(trained[start : start + length] == held[:length] for start in starts)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document, much longer than all chats together."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(counting(20_000))
    return path


def test_of_a_book_beside_chats_the_end_is_held_out(chats: Path, book: Path) -> None:
    """More is wanted than the chats have, so the book is one of the documents taken."""
    wanted = 8192
    assert sum(len(rendered(one)) for one in CHATS) < wanted
    mixed = {"assistant_only_loss": False, "validation_tokens": wanted}
    of_book = opened(book, **mixed)
    assert of_book.data_tokens is not None

    loader = opened(chats, book, **mixed)

    assert loader.data_tokens is not None
    assert loader.data_tokens > of_book.data_tokens - wanted
    assert len(loader.validation_blocks) == wanted // SIZE


def test_a_book_beside_chats_is_no_chat_longer_than_a_block(tmp_path: Path, book: Path) -> None:
    short = [[{"role": "user", "content": f"question {number}"}] for number in range(30)]
    file = write_chats(tmp_path / "short.jsonl", *short)

    loader = opened(file, book, assistant_only_loss=False, validation_tokens=SIZE)

    assert "longer than a block" not in loader.summary


def test_held_out_blocks_have_something_to_predict(tmp_path: Path) -> None:
    """The first blocks of a long prompt have nothing that counts; later ones measure the run."""

    def words(number: int, count: int) -> str:
        return " ".join(str(1000 * number + index) for index in range(count))

    long_prompts = [
        [
            {"role": "user", "content": words(number, 2 * SIZE)},
            {"role": "assistant", "content": words(number + 50, SIZE)},
        ]
        for number in range(12)
    ]
    data = write_chats(tmp_path / "long.jsonl", *long_prompts)
    loader = opened(data, validation_tokens=SIZE)
    (block,) = loader.validation_blocks
    assert has_targets(block)


def tiny(seed: int = 0) -> Any:
    """A random Llama with as many tokens as the tokenizer."""
    known = TINY["llama"]
    return build(replace(known, options={**known.options, "vocab_size": 4096}), 2, seed=seed)


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    loss, sums = training_model(model)(**batch)
    return float(loss.detach()), sums.tolist()


def test_the_loss_is_that_of_transformers_with_labels_of_minus_100(chats: Path) -> None:
    loader = opened(chats)
    batch = stack([loader.block(number) for number in range(4)])
    model = tiny().train()
    labels = batch["input_ids"].masked_fill(batch["loss_mask"] == 0, -100)

    loss, (predictions, nats, _) = loss_of(model, batch)

    expected = model(input_ids=batch["input_ids"], labels=labels).loss
    assert predictions == int((labels[:, 1:] >= 0).sum())
    assert loss / predictions == pytest.approx(float(expected), rel=1e-5)
    assert nats == pytest.approx(loss)
    whole, (all_predictions, *_) = loss_of(model, {"input_ids": batch["input_ids"]})
    assert all_predictions == 4 * (SIZE - 1) > predictions  # the control
    assert whole / all_predictions != pytest.approx(float(expected), rel=1e-5)


def test_distillation_counts_the_same_positions(chats: Path) -> None:
    loader = opened(chats)
    batch = stack([loader.block(number) for number in range(2)])
    model = tiny().train()
    teacher = tiny(seed=1).eval()

    loss, _ = training_model(model, teacher)(**batch)

    inputs = batch["input_ids"][:, :-1]
    with torch.no_grad():
        p, q = (one(input_ids=inputs).logits.float().log_softmax(-1) for one in (teacher, model))
    divergence = (p.exp() * (p - q)).sum(-1)
    counted = batch["loss_mask"][:, 1:].bool()
    assert float(loss.detach()) == pytest.approx(float(divergence[counted].sum()), rel=1e-4)
    assert float(loss.detach()) != pytest.approx(float(divergence.sum()), rel=1e-2)


def test_a_step_counts_the_predictions_of_the_mask(chats: Path) -> None:
    loader = opened(chats)
    (batch,) = next(loader.batches(0, 0, 1, 2))

    _, targets = split_batch(batch)

    assert torch.equal(targets.reshape(2, -1) >= 0, batch["loss_mask"][:, 1:] == 1)


def test_a_token_takes_its_mask_into_repeats(chats: Path) -> None:
    loader = opened(chats, repeats=True)
    known = {1: set[int](), 0: set[int]()}
    for one in CHATS:
        for token, counts in zip(rendered(one), marks(one), strict=True):
            known[counts].add(token)
    blocks = [loader.block(number) for number in range(20)]

    pairs = [(int(t), int(m)) for block in blocks for t, m in zip(*block.values(), strict=True)]

    assert all(token in known[counts] for token, counts in pairs)
    assert {counts for _, counts in pairs} == {0, 1}
    plain = opened(chats, repeats=True, assistant_only_loss=False)
    ids = [plain.block(number)["input_ids"].tolist() for number in range(20)]
    assert ids == [block["input_ids"].tolist() for block in blocks]


def test_rows_with_a_mask_repeat_as_rows_without() -> None:
    ids = np.arange(7 * SIZE).reshape(7, SIZE)
    with_mask = np.stack([ids, ids % 2], axis=2)

    for number in range(7):
        alone = with_repeats(ids.__getitem__, number, 3, int(ids[0, 0]))
        both = with_repeats(with_mask.__getitem__, number, 3, int(ids[0, 0]))
        assert both[:, 0].tolist() == alone.tolist()
        assert both[:, 1].tolist() == (alone % 2).tolist()


@pytest.mark.parametrize("assistant_only_loss", [False, True])
def test_a_stream_of_chats_is_packed_as_stored_ones(chats: Path, assistant_only_loss: bool) -> None:
    """And read on from a position that went through JSON."""
    source = parse_source(str(chats))
    encoders = Encoders(with_template(CHATML), "m", assistant_only_loss=assistant_only_loss)
    stored = Blocks(tokenize([source], encoders), np.tile(np.arange(len(CHATS)), 2), SIZE)

    def stream() -> StreamedBlocks:
        return StreamedBlocks(source, encoders.chats, block_size=SIZE, heldout=HeldoutDocuments())

    blocks = stream()
    for number in range(len(stored)):
        streamed, expected = blocks[number], stored[number]
        assert streamed.keys() == expected.keys()
        assert all(np.array_equal(streamed[name], expected[name]) for name in expected)
        if number == 10:
            positions = json.loads(json.dumps(blocks.bookmark().saved_lanes))
    again = stream()
    again.seek(positions)
    assert np.array_equal(again[11]["input_ids"], stored[11]["input_ids"])
    if assistant_only_loss:
        assert np.array_equal(again[11]["loss_mask"], stored[11]["loss_mask"])


def test_a_stream_in_which_nothing_counts_is_refused_after_a_stop_too(tmp_path: Path) -> None:
    """Whether it was stopped in its first pass or not."""
    asked = [[{"role": "user", "content": f"question {number}"}] for number in range(40)]
    source = parse_source(str(write_chats(tmp_path / "chats.jsonl", *asked)))
    encoders = Encoders(with_template(CHATML), "m", assistant_only_loss=True)

    def stream() -> StreamedBlocks:
        return StreamedBlocks(source, encoders.chats, block_size=SIZE, heldout=HeldoutDocuments())

    before = stream()
    assert len(before[0]["input_ids"]) == SIZE
    continued = stream()
    continued.seek(json.loads(json.dumps(before.bookmark().saved_lanes)))
    for blocks in (before, continued):
        with pytest.raises(RefusedError, match="has an assistant turn"):
            blocks[1000]


def test_calibration_reads_the_tokens_that_training_reads(chats: Path, tmp_path: Path) -> None:
    model = chat_model(tmp_path, CHATML)
    text = CalibrationText((str(chats),), SIZE * 1000, SIZE, repeats=False)

    reader = CalibrationReader(text, read_checkpoint(model), "cpu", SILENT)
    blocks, _ = reader.blocks_and_heldout()

    of_text = {"assistant_only_loss": False, "validation": "stdlib:heldout"}
    trained = joined(opened(chats, **of_text), "input_ids")
    assert len(trained) == 20 * SIZE
    assert blocks.flatten().tolist()[: len(trained)] == trained


def test_evaluation_scores_the_tokens_that_training_reads() -> None:
    encoders = Encoders(with_template(CHATML), "m", text_encoder=HarnessEncoder)
    rows = [Chat((text_of(one),)) for one in CHATS[:5]]

    windows = [parts for _, parts, _ in document_windows(rows, encoders, SIZE)]

    for one, parts in zip(CHATS[:5], windows, strict=True):
        scored = [token for window in parts for token in window.ids[-window.scored :]]
        # BOS, which the template writes, is the first token that is read, and there is no other.
        assert [parts[0].ids[0], *scored] == rendered(one)
        assert rendered(one)[0] == 1 != rendered(one)[1]


def tiny_model(place: Path, template: str = CHATML) -> Path:
    """The tiny model of the training tests, with a chat template."""
    model = Path(shutil.copytree(material() / "model", place / "model"))
    edit_json(model / "tokenizer_config.json", lambda config: config | {"chat_template": template})
    return model


def test_a_run_on_chats_is_continued_bit_for_bit(runs: Runs, tmp_path: Path, chats: Path) -> None:
    model = tiny_model(tmp_path)
    options = {"data": chats, "steps": 4, "save_every": 2, "assistant_only_loss": True}

    def words(out: str, **more: Any) -> list[str]:
        return runs.words(tmp_path / out, model=str(model), teacher="teacher", **options | more)

    runs.finish(*words("straight"))
    killed = words("killed")
    assert runs.run(*killed, before=[partial(kill_at, 3)]).code == -signal.SIGKILL
    runs.finish(*killed)

    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert difference(tmp_path / "killed", tmp_path / "straight") == 0
    runs.finish(*words("whole", assistant_only_loss=None))
    assert losses(tmp_path / "whole") != losses(tmp_path / "straight")  # the control


COMMANDS = {
    "convert": ("gqa-convert", ["--kv-heads", 2, "--method", "calibrated", "--tokens", 512]),
    "uptrain": ("gqa-uptrain", ["--teacher", "none", "--steps", 2]),
    "eval": ("gqa-eval", []),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_tokenizer_without_a_template_is_refused(
    name: str, tmp_path: Path, chats: Path, alone: None
) -> None:
    program, words = COMMANDS[name]
    out = [] if name == "eval" else ["-o", tmp_path / "out"]

    result = run(SOURCE, "--data", chats, *words, *out, program=program)

    check_refused(
        result,
        "the tokenizer of stdlib-mha has no chat template, so it cannot read chats; pass a column",
        program=program,
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([[{"role": "user", "content": "hello"}]] * 40, "no chat of .* has an assistant turn"),
        (["plain text"] * 40, "--assistant-only-loss needs chats in a column messages"),
    ],
    ids=["no assistant", "text"],
)
def test_data_on_which_no_token_counts_is_refused(
    data: list[Any], says: str, tmp_path: Path, alone: None
) -> None:
    path = write_chats(tmp_path / "data.jsonl", *data)
    column = ["--text-column", "messages"]
    words = ["--teacher", "none", "--steps", 1, "--context", 16, "--assistant-only-loss"]

    result = run(
        tiny_model(tmp_path),
        "--data",
        path,
        *column,
        *words,
        "-o",
        tmp_path / "out",
        program="gqa-uptrain",
    )

    assert re.search(says, check_refused(result, program="gqa-uptrain", advice=""))


def test_generated_text_has_no_roles(tmp_path: Path, alone: None) -> None:
    words = ["--data", "self", "--teacher", material() / "teacher", "--assistant-only-loss"]

    result = run(tiny_model(tmp_path), *words, "-o", tmp_path / "out", program="gqa-uptrain")

    check_refused(
        result, "--assistant-only-loss needs chats of your own", program="gqa-uptrain", advice=""
    )


def test_sharegpt_evaluates_as_messages_do(tmp_path: Path, alone: None) -> None:
    model = chat_model(tmp_path, CHATML)
    some = CHATS[:12]
    messages = write_chats(tmp_path / "one.jsonl", *some)
    forms = map(sharegpt, some)
    conversations = write_chats(tmp_path / "other.jsonl", *forms, column="conversations")

    records = []
    for path in (messages, conversations):
        result = run(model, "--data", path, "--context", 64, "--json", "-q", program="gqa-eval")
        assert result.code == 0, result
        records.append(json.loads(result.out))

    first, second = (record["models"][0]["quality"] for record in records)
    assert first == second
    assert first["tokens"] == sum(len(rendered(one)) - 1 for one in some)
