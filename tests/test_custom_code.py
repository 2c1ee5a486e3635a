"""Custom modeling code against the classes of transformers that it extends; its files, and what is
done with them.

A tiny random model of each source is converted by the rewriter at every G, and read by the class
that was written beside it. Tolerances are relative to the largest logit, float32.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import run
from support.custom_code import THEIRS
from support.embedded import counting
from support.families import (
    CONTROL,
    all_tensors,
    check_same_tensors,
    error,
    left_padded,
    load,
    planned,
    tiled_heads,
    write_checkpoint,
)
from support.repository import SCRIPTS
from support.tiny_configs import COPIES, CUSTOM
from support.tiny_models import QUERY_HEADS, Tiny, build, inputs, logits
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.convert.recast import targets
from gqa.models import custom_code, modeling
from gqa.models.classes import model_class
from gqa.models.custom_code import BY_LAYER, MODEL_TYPES, config_class
from gqa.models.tokenizer import load_tokenizer

TOLERANCE = 1e-5
OURS = {tiny.name.removeprefix("gqa_"): tiny for tiny in CUSTOM}


@pytest.fixture(autouse=True)
def _no_native_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 becomes GPTBigCode where that holds the heads."""
    # This file tests the custom code
    monkeypatch.setattr(
        targets,
        "RECASTINGS",
        tuple(entry for entry in targets.RECASTINGS if not entry.architecture),
    )


@pytest.fixture(scope="module")
def all_converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every source with two key/value heads; GPT-2 with a tokenizer."""
    made = {}
    for name, tiny in THEIRS.items():
        place = tmp_path_factory.mktemp(name)
        directory = write_checkpoint(build(tiny, QUERY_HEADS), place / "source")
        if name == "gpt2":
            # One token a character, and nothing that names its class: as the first GPT-2
            # checkpoints.
            tokens = ["<pad>", "<s>", "<|endoftext|>", "Ġ", *(chr(code) for code in range(33, 122))]
            (directory / "vocab.json").write_text(
                json.dumps({token: i for i, token in enumerate(tokens)})
            )
            (directory / "merges.txt").write_text("#version: 0.2\n")
            (directory / "tokenizer_config.json").write_text('{"model_max_length": 64}')
        made[name] = convert_checkpoint(directory, 2, place / "out", method="mean").out
    return made


@pytest.fixture
def merged(request: pytest.FixtureRequest, all_converted: dict[str, Path]) -> Path:
    """The conversion of one model type of transformers to two heads."""
    return all_converted[request.param]


@pytest.fixture
def source(merged: Path) -> Path:
    return merged.with_name("source")


families = pytest.mark.parametrize("merged", THEIRS, indirect=True, ids=str)
# Without those whose code is another one's with other names.
ORIGINALS = [name for name in THEIRS if name not in COPIES]
originals = pytest.mark.parametrize("merged", ORIGINALS, indirect=True, ids=str)


def tiny_of(directory: Path) -> Tiny:
    """Of a checkpoint, of the source or of ours."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    return (
        OURS[model_type.removeprefix("gqa_")]
        if model_type.startswith("gqa_")
        else THEIRS[model_type]
    )


def both(
    source: Path, merged: Path, attention: str = "eager"
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The conversion, and the source's class with each of its heads repeated, which compute the
    same.
    """
    back = planned(tiny_of(source), plan_conversion(merged, QUERY_HEADS), attention)
    return load(tiny_of(merged), merged, attention), back


@families
def test_as_many_heads_as_before(source: Path, tmp_path: Path) -> None:
    """The class itself: the same tensors, the same logits, whichever attention function computes
    them.
    """
    out = convert_checkpoint(source, QUERY_HEADS, tmp_path / "out").out
    check_same_tensors(out, source)
    given = inputs(tiny_of(source))
    for attention in tiny_of(source).attention:
        expected = logits(tiny_of(source), load(tiny_of(source), source, attention), given)
        assert (
            error(logits(tiny_of(out), load(tiny_of(out), out, attention), given), expected)
            < TOLERANCE
        )


@families
def test_expand_back_in_the_source_class(source: Path, merged: Path) -> None:
    """Each merged head repeated gives the same logits, repeated in tiles it does not.

    Cross-attention is merged.
    """
    tiny, given = tiny_of(source), inputs(tiny_of(source))
    model, back = both(source, merged)
    expected = logits(tiny_of(merged), model, given)
    assert error(logits(tiny, back, given), expected) < TOLERANCE
    assert error(expected, logits(tiny, load(tiny, source), given)) > TOLERANCE * 10
    with tiled_heads():
        wrong = both(source, merged)[1]
    assert error(logits(tiny, wrong, given), expected) > TOLERANCE * CONTROL
    before = all_tensors(source)
    changed = [
        name
        for name, tensor in all_tensors(merged).items()
        if not torch.equal(tensor, before[name])
    ]
    assert not any("encoder." in name for name in changed)
    assert any("ncoder_attn" in name or "EncDec" in name for name in changed) == (
        "decoder_input_ids" in given
    )


WAYS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


@originals
def test_generation(source: Path, merged: Path) -> None:
    """Prompts of several lengths, padded left: the tokens of the source's class, also with and
    without a cache.
    """
    given = {
        name: ids
        for name, ids in inputs(tiny_of(merged), length=8).items()
        if name != "decoder_input_ids"
    }
    given = left_padded(given, 3)
    model, back = both(source, merged, tiny_of(merged).attention[-1])
    written: dict[str, Tensor] = {}
    for way, options in WAYS.items():
        if way == "static" and not model._can_compile_fullgraph:
            continue
        settings = {
            "max_new_tokens": 5,
            "max_length": None,
            "do_sample": False,
            "eos_token_id": None,
            **options,
        }
        written[way] = model.generate(**given, **settings)
        assert torch.equal(written[way], back.generate(**given, **settings)), way
        assert torch.equal(written[way], written["greedy"]), way


@pytest.mark.parametrize("name", ORIGINALS)
def test_heads_that_do_not_divide(name: str) -> None:
    with pytest.raises(
        ValueError, match="num_key_value_heads 3 does not divide the 4 attention heads"
    ):
        build(OURS[name], 3)


# --------------------------------------- files, and what transformers and our commands do with them


FILES = sorted(Path(modeling.__path__[0]).glob("modeling_*.py"))


def file_of(name: str) -> str:
    return custom_code.file_of(f"gqa_{name}")[0]


def test_every_file_has_a_tiny_model() -> None:
    assert {f"gqa_{name}" for name in (*THEIRS, *BY_LAYER)} == MODEL_TYPES
    assert {path.name for path in FILES} == {file_of(name) for name in (*THEIRS, *BY_LAYER)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_need_nothing_else(path: Path) -> None:
    """But the standard library, torch and transformers."""
    imported = re.findall(r"^ *(?:from|import) (\w*)", path.read_text(), re.MULTILINE)
    assert (
        {"transformers"}
        <= {*imported}
        <= {"collections", "types", "typing", "torch", "transformers"}
    )


@pytest.mark.parametrize("model_type", sorted(MODEL_TYPES))
def test_configs_have_the_defaults_of_transformers(model_type: str) -> None:
    new = {"model_type", "num_key_value_heads"}
    theirs, ours = (
        config_class(model_type.removeprefix("gqa_"))().to_dict(),
        config_class(model_type)().to_dict(),
    )
    assert {key: ours[key] for key in ours.keys() - new} == {
        key: theirs[key] for key in theirs.keys() - new
    }


# ----------------------------------------------------------------- transformers, in another process


def test_every_auto_class_in_a_fresh_process(
    all_converted: dict[str, Path], tmp_path: Path
) -> None:
    """Without trust nothing is run: no class of transformers takes the weights for its own and
    computes something else. With trust_remote_code alone, from the file beside the weights: our
    logits. (Of most model types, the one class.)
    """
    for name, out in all_converted.items():
        torch.save(inputs(THEIRS[name]), out.parent / "given.pt")
    words = [json.dumps(["gpt2", "bart"]), *map(str, all_converted.values())]
    subprocess.run(
        [sys.executable, SCRIPTS / "load_custom_code.py", *words],
        check=True,
        cwd=tmp_path,
        input="n\n",
        text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )
    for name, out in all_converted.items():
        expected = logits(OURS[name], load(OURS[name], out), inputs(THEIRS[name]))
        found = [torch.load(path) for path in out.parent.glob("Auto*.pt")]
        assert found
        assert all(error(one, expected) < TOLERANCE for one in found), name
        installed = Path(modeling.__path__[0]) / file_of(name)
        written, saved = (place / file_of(name) for place in (out, out.parent / "saved"))
        assert written.read_bytes() == saved.read_bytes() == installed.read_bytes()
        ours, again = (
            json.loads((file.parent / "config.json").read_text())["auto_map"]
            for file in (written, saved)
        )
        assert {"AutoConfig", "AutoModel"} < ours.keys()
        assert {auto: made.rpartition("--")[2] for auto, made in again.items()} == ours


def test_our_commands_need_no_trust(all_converted: dict[str, Path], tmp_path: Path) -> None:
    """Evaluate, train and convert again, verified by loading, all without --trust-remote-code; the
    tokenizer is carried along, and where only the model type said which it is, the config says it
    now. The installed code runs, not the file beside the weights.
    """
    two = shutil.copytree(all_converted["gpt2"], tmp_path / "two")
    (two / "modeling_gqa.py").write_text("raise RuntimeError('run')")
    source = all_converted["gpt2"].with_name("source")
    before, after = (
        load_tokenizer(read_checkpoint(place))("a dog").input_ids for place in (source, two)
    )
    assert before == after != []
    (tmp_path / "text.txt").write_text(counting(200))
    data, trained = ("--data", tmp_path / "text.txt"), tmp_path / "trained"
    done = run(two, *data, "--json", program="gqa-eval")
    assert done.code == 0, done.err
    done = run(two, *data, "--steps", 1, "--context", 16, "-o", trained, program="gqa-uptrain")
    assert done.code == 0, done.err
    assert (trained / "modeling_gqa.py").is_file()
    assert "verified, loads in transformers with trust_remote_code=True" in done.said
    done = run("--kv-heads", 1, "--method", "mean", "-o", tmp_path / "one", trained)
    done.expect()
    assert tiny_of(tmp_path / "one").name == "gqa_gpt2"
    assert "trust_remote_code=True" in done.err


@pytest.mark.parametrize(
    ("auto_map", "expected"),
    [
        # The entry whose code is the class that `architectures` names, wherever it stands
        (
            {
                "AutoModelForSequenceClassification": "m.OursForClassification",
                "AutoModelForCausalLM": "m.OursForCausalLM",
            },
            "AutoModelForCausalLM",
        ),
        (
            {
                "AutoModelForCausalLM": "m.OtherForCausalLM",
                "AutoModelForSeq2SeqLM": "m.OursForCausalLM",
            },
            "AutoModelForSeq2SeqLM",
        ),
        # None of that name: one that predicts tokens, or the first
        (
            {
                "AutoModelForSequenceClassification": "m.A",
                "AutoModelForCausalLM": "m.B",
            },
            "AutoModelForCausalLM",
        ),
        ({"AutoModelForSequenceClassification": "m.A"}, "AutoModelForSequenceClassification"),
        # Auto classes that transformers lacks, and an entry of the wrong type
        ({"AutoModelForNothing": "m.OursForCausalLM"}, "AutoModelForCausalLM"),
        (["AutoModelForCausalLM"], "AutoModelForCausalLM"),
    ],
)
def test_the_auto_class_is_that_of_the_architecture(auto_map: Any, expected: str) -> None:
    config = LlamaConfig(architectures=["OursForCausalLM"])
    config.auto_map = auto_map
    assert model_class(config, trust_remote_code=True).__name__ == expected
