"""Runs that find maps: deterministic, resumable, and one line for whatever stands in their way."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from support import checkpoints
from support.calibrations import SHORT, plan_of
from support.checkpoints import check_refused, edit_json
from support.embedded import counting
from support.evaluations import with_tokenizer
from support.families import write_checkpoint
from support.faults import kill_conversion_after_a_layer
from support.patches import log_every_line
from support.scrambled import find_maps, on_ids
from support.tiny_models import TINY, build
from support.training import Runs, difference, tiny_checkpoint

from gqa.checkpoint.read import read_checkpoint
from gqa.convert.api import convert_checkpoint
from gqa.convert.merge.calibration_reader import CalibrationReader
from gqa.convert.merge.quality import CHECKED_TOKENS
from gqa.core.console import SILENT
from gqa.core.errors import RefusedError
from gqa.core.run_directory import RunDirectory
from gqa.models.loading import load_model

SHORT_REFINEMENT = ("--refine-steps", 2)  # of the default method


@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_quality_is_that_of_the_written_model_beside_its_base_model(
    source: Path, tmp_path: Path, method: str
) -> None:
    """On text that nothing is fitted to, as whole models have it."""
    options, out = on_ids(refinement=SHORT, check=True), tmp_path / "out"
    done = convert_checkpoint(source, 2, out, method=method, maps_options=options)
    quality = done.record["quality"]
    reader = CalibrationReader(options.text, read_checkpoint(source), "cpu", SILENT)
    _, ids = reader.blocks_and_heldout(CHECKED_TOKENS)
    assert quality["tokens"] == 15 * len(ids) == 15 * 512
    copies = torch.cat([ids[:16, :8], ids[:16, :8]], 1)
    for name, directory in (("base", source), ("converted", out)):
        model = load_model(str(directory), dtype="float32")
        with torch.no_grad():
            logits, repeated = model(ids).logits[:, :-1], model(copies).logits[:, 8:-1]
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        assert quality["perplexity"][name] == pytest.approx(float(nats.exp()), rel=1e-4)
        hits = (repeated.argmax(-1) == copies[:, 9:]).double().mean()
        # One of 112 may be a tie
        assert quality["recall"][name] == pytest.approx(float(hits), abs=0.009)
    perplexity = quality["perplexity"]
    assert quality["ratio"] == pytest.approx(perplexity["converted"] / perplexity["base"])
    assert quality["ratio_low"] < quality["ratio"] < quality["ratio_high"]


@pytest.mark.parametrize(
    ("method", "stage"),
    [("calibrated", "calibrating"), ("refined", "calibrating and refining")],
)
def test_progress_says_whether_layers_are_trained(
    small: Path, tmp_path: Path, method: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_every_line(monkeypatch)
    steps = ("--refine-steps", 1) if method == "refined" else ()
    text = ("--tokens", 256, "--context", 16, "--no-check")
    out = tmp_path / "out"
    done = checkpoints.run(small, "-g", 2, "-o", out, "--method", method, *steps, *text)
    assert re.search(rf"^{stage}: 2 of 2 layers", done.err, re.MULTILINE), done.err


def test_what_is_said_of_the_quality(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is measured a line in the output, the record and the card; else the command that
    measures it.
    """
    text = ("--method", "calibrated", "--tokens", 256, "--context", 16)
    out = tmp_path / "out"

    def convert(*words: object) -> checkpoints.Result:
        return checkpoints.run(small, "-g", 2, "-o", out, "--overwrite", *words)

    done = convert(*text)
    quality = r"\S+: perplexity x[\d.]+ \(95% interval .*\) on .*, recall \d+% -> \d+%"
    (line,) = re.findall(rf"^quality     ({quality})$", done.out, re.M)
    assert " tokens of generated text in windows of 16, recall " in line
    level, _, numbers = line.partition(": ")
    card = (out / "README.md").read_text()
    assert f"**{level.capitalize()}** (" in card
    assert numbers in card.replace("\\", "")
    assert re.search(
        r"^errors      relative squared error .*:\n            [\d.e-]+ +[\d.e-]+\n"
        r"drift       difference of the hidden states .*:\n            \d+% +\d+%$",
        done.out,
        re.M,
    )
    (tmp_path / "text.txt").write_text(counting())
    # A random model loses nothing: with this bound it counts as damaged
    monkeypatch.setattr("gqa.convert.verdict.DAMAGED_RATIO", 0.5)
    done = convert("--data", tmp_path / "text.txt", "--json", *text)
    assert " tokens of held-out blocks of text.txt in windows of 16, recall " in done.err
    says = (
        "damaged, not usable as it is. Keep more KV heads, use --method refined, or train it: "
        "gqa-uptrain"
    )
    assert f"warning: the converted model is {says} {out}\n" in done.err
    record = json.loads((out / "gqa_conversion.json").read_text())
    assert json.loads(done.out)["quality"] == record["quality"]
    assert record["maps"]["text"]["sources"] == ["text.txt"], "no directory of this machine"
    for words in (("--no-check", *text), ("--method", "aligned")):
        command = f"gqa-eval {small} {out} --data stdlib:heldout --tokens 20000"
        assert (
            f"quality     not measured; to measure perplexity: {command}\n" in convert(*words).out
        )
        assert "quality" not in json.loads((out / "gqa_conversion.json").read_text())
    scores = {"tokens": 30, "ratio": math.nan, "perplexity": {"base": 2.0, "converted": math.inf}}
    # A ratio that is no number, which JSON cannot say
    monkeypatch.setattr("gqa.convert.merge.quality.QualityCheck.result", lambda check: scores)
    done = convert(*text, "--json")
    for written in (done.out, (out / "gqa_conversion.json").read_text()):
        assert json.loads(written, parse_constant=pytest.fail)["quality"]["ratio"] is None
    assert "warning: the converted model is damaged" in done.err


def test_a_model_that_fills_gaps_is_not_measured(tmp_path: Path) -> None:
    """It has a head, which does not predict the next token: command, record and card agree."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.EuroBertConfig(
        **sizes, num_key_value_heads=4, vocab_size=4096, pad_token_id=0
    )
    model = with_tokenizer(transformers.EuroBertForMaskedLM(config), tmp_path / "model")
    (tmp_path / "text.txt").write_text(counting())
    out, text = (
        tmp_path / "out",
        ("--tokens", 256, "--context", 16, "--data", tmp_path / "text.txt"),
    )
    done = checkpoints.run(model, "-g", 2, *SHORT_REFINEMENT, "-o", out, *text)
    assert (
        "quality     not measured: the model has no language-modeling head (lm_head)\n" in done.out
    )
    assert not {"next", "gqa-uptrain"} & {*done.out.split()}
    assert "Quality was not measured." in (out / "README.md").read_text()


@pytest.fixture
def stopped(small: Path, tmp_path: Path, runs: Runs) -> tuple[object, ...]:
    """The words of a conversion that was stopped after its first layer."""
    text = tmp_path / "text.txt"
    text.write_text(counting())
    words = (
        small,
        "-g",
        2,
        *SHORT_REFINEMENT,
        "--data",
        text,
        "--context",
        16,
        "--tokens",
        256,
        "-o",
        tmp_path / "out",
    )
    ended = runs.run(*words, program="convert", before=[kill_conversion_after_a_layer])
    assert ended.code == -signal.SIGKILL, ended.err
    return words


def test_a_stopped_conversion_names_the_options_that_differ(stopped: tuple[object, ...]) -> None:
    result = checkpoints.run(*stopped, "--seed", 3, "--precision", "bfloat16")
    message = checkpoints.check_refused(
        result, "(--precision: float32 -> bfloat16; --seed: 0 -> 3)"
    )
    assert not set("{}[]'") & set(message)


def test_a_stopped_conversion_is_continued_without_its_check_and_has_the_same_layers(
    stopped: tuple[object, ...], tmp_path: Path
) -> None:
    whole = checkpoints.run(*stopped[:-1], tmp_path / "whole")
    continued = checkpoints.run(*stopped, "--no-check")
    whole.expect()
    continued.expect()
    assert "continues   after layer 1 of 2" in continued.err
    assert "quality     not measured" in continued.out
    assert checkpoints.contents(tmp_path / "out") == checkpoints.contents(tmp_path / "whole")


def test_a_conversion_that_was_stopped_without_its_check_says_that_it_cannot_be_checked(
    small: Path, tmp_path: Path, runs: Runs
) -> None:
    text = ("--context", 16, "--tokens", 256)
    words = (small, "-g", 2, *SHORT_REFINEMENT, *text, "-o", tmp_path / "out")
    runs.run(*words, "--no-check", program="convert", before=[kill_conversion_after_a_layer])
    continued = checkpoints.run(*words)
    assert continued.code == 0, continued
    assert "continues   after layer 1 of 2" in continued.err
    assert (
        "warning: the quality is not measured, because the run that is continued had --no-check"
        in continued.err
    )


def test_an_encoder_decoder_is_never_checked_and_never_blamed_for_it(
    tmp_path: Path, runs: Runs
) -> None:
    """A conversion that goes on does not say that the one before had --no-check."""
    source = write_checkpoint(build(TINY["gqa_t5"], 4), tmp_path / "source")
    text = ("--context", 16, "--tokens", 256)
    words = (source, "-g", 2, *SHORT_REFINEMENT, *text, "-o", tmp_path / "out")
    runs.run(*words, program="convert", before=[kill_conversion_after_a_layer])
    continued = checkpoints.run(*words)
    assert continued.code == 0, continued
    assert "continues   after layer 1 of 2" in continued.err
    assert "--no-check" not in continued.err


def test_a_conversion_goes_on_where_it_was_killed(small: Path, tmp_path: Path, runs: Runs) -> None:
    """As without interruption, and nothing is left.

    Refused: other options, and other content of model or text.
    """
    model, text, out = (
        Path(shutil.copytree(small, tmp_path / "model")),
        tmp_path / "text.txt",
        tmp_path / "out",
    )
    text.write_text(counting())

    def words(output: Path) -> tuple[Any, ...]:
        return (
            model,
            "-g",
            2,
            "--method",
            "refined",
            "--refine-steps",
            2,
            "--data",
            text,
            "-o",
            output,
            "--context",
            16,
            "--tokens",
            256,
        )

    stopped = runs.run(*words(out), program="convert", before=[kill_conversion_after_a_layer])
    assert stopped.code == -signal.SIGKILL, stopped.err
    assert not out.exists()
    layer = tmp_path / ".out.gqa-work/00000.safetensors"
    kept = layer.rename(tmp_path / "layer")
    assert (
        ".out.gqa-work/state.safetensors is damaged; start over" in checkpoints.run(*words(out)).err
    )
    kept.rename(layer)
    other = checkpoints.run(*words(out), "--tokens", 512).err
    assert (
        "holds layers of another run (--tokens: 256 -> 512); finish that with its options, or"
        in other
    )
    checkpoints.edit_tensors(
        model, lambda t: {n: t[n].flip(0) if ".mlp." in n else t[n] for n in t}
    )
    assert re.search(
        r"holds layers of another run \(content of the model: \w{12} -> \w{12}\); finish",
        checkpoints.run(*words(out)).err,
    )
    shutil.copytree(small, model, dirs_exist_ok=True, copy_function=shutil.copyfile)
    text.write_text("others " * 999)
    assert re.search(
        r"holds layers of another run \(content of --data: .*\); finish",
        checkpoints.run(*words(out)).err,
    )
    text.write_text(counting())
    records = []
    for place in (out, tmp_path / "whole"):
        done = checkpoints.run(*words(place))
        done.expect()
        assert ("continues   after layer 1 of 2, where" in done.out + done.err) == (place == out)
        record = json.loads((place / "gqa_conversion.json").read_text())
        records.append([record["quality"], record["layer_errors"], record["layer_drifts"]])
    assert records[0] == records[1]
    assert difference(out, tmp_path / "whole") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "text.txt", "whole"]


NEEDY = [
    "embedding_gemma2_text",
    "gemma3n_text",
    "gemma4_text",
    "qwen4_exp_text",
    "zamba",
    "zamba2",
]


@pytest.mark.parametrize("name", NEEDY)
def test_layers_that_need_more_than_hidden_states(name: str, tmp_path: Path) -> None:
    """Embeddings of each layer's own, other streams, layers that read others' keys: refused in one
    line.
    """
    directory, says = (
        write_checkpoint(build(TINY[name], 4), tmp_path / "source"),
        "cannot be run layer by layer",
    )
    with pytest.raises(RefusedError, match=says) as refusal:
        convert_checkpoint(
            directory, 2, tmp_path / "out", method="refined", maps_options=on_ids(refinement=SHORT)
        )
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ----------------------------------------------------------------------------------------- refusals


def broken(directory: Path, name: str, value: float) -> None:
    checkpoints.edit_tensors(directory, lambda tensors: tensors[name].view(-1)[5].fill_(value))


def without_tokenizer(directory: Path) -> None:
    for file in directory.glob("*token*"):
        file.unlink()


def narrower(directory: Path) -> None:
    """An embedding with fewer rows than the tokenizer has tokens."""
    checkpoints.edit_tensors(
        directory, lambda t: {n: t[n] if "layers." in n else t[n][:50].clone() for n in t}
    )
    checkpoints.edit_json(directory / "config.json", lambda config: config.update(vocab_size=50))


def unstarted(directory: Path) -> None:
    checkpoints.edit_json(
        directory / "config.json",
        lambda config: config.update(bos_token_id=None, eos_token_id=None),
    )


LAST = "model.layers.1.self_attn"
CASES: dict[str, tuple[Callable[[Path], None] | None, str | None, str]] = {
    # What is done to the model, the text (None: self), what is said.
    "short": (
        None,
        "a few words",
        r".*text\.txt has \d tokens, less than one block of 16 tokens; pass more text, or lower .*",
    ),
    "empty": (None, "", r".*text\.txt has no text: .*"),
    "tokenizer": (
        without_tokenizer,
        "words " * 99,
        r"model has no tokenizer; copy .*, or use self",
    ),
    "vocabulary": (
        narrower,
        "words " * 99,
        r"the tokenizer gives token \d+, but the embedding of model has 50 rows: .*",
    ),
    "start": (
        unstarted,
        None,
        r".* has neither a BOS nor an EOS token, so no text can be started; "
        r"set bos_token_id in its config.json, or pass text with --data instead of self",
    ),
    **{
        f"{value}-{name}": (
            lambda directory, name=name, value=value: broken(
                directory, f"model.layers.{name}.weight", value
            ),
            counting(200),
            f"layer {name[0]} computes NaN or Inf on the calibration text; download the "
            "checkpoint again",
        )
        for name, value in (
            ("0.self_attn.k_proj", torch.nan),
            ("1.self_attn.o_proj", torch.nan),
            ("0.mlp.down_proj", torch.inf),
        )
    },
    "nan-self": (
        lambda directory: broken(directory, f"{LAST}.k_proj.weight", torch.nan),
        None,
        r".* (computes NaN or Inf|cannot generate).*",
    ),
    "weights": (
        lambda directory: broken(directory, f"{LAST}.o_proj.weight", torch.nan),
        "",
        f"{LAST} of model contains NaN or Inf; .*",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_for_what_cannot_be_calibrated(
    small: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what is left there would be seen, too
    change, text, expected = CASES[case]
    model = Path(shutil.copytree(small, tmp_path / "model"))
    if change:
        change(model)
    file = tmp_path / "text.txt"
    file.write_text(text or "")
    before = checkpoints.snapshot(tmp_path)
    words = ("--data", "self" if text is None else file, "--context", 16, "--tokens", 64)
    methods: list[tuple[Any, ...]] = [("calibrated", *words)]
    if case == "weights":
        methods = [("procrustes",), ("aligned",)]
    elif "layer" in expected:
        methods.append(("refined", "--refine-steps", 2, *words))
    for method in methods:
        done = checkpoints.run(model, "-o", tmp_path / "out", "-g", 2, "--method", *method)
        assert done.code == 2, done.err
        assert re.fullmatch(r"(estimate    about .*\n)?", done.out)
        assert re.fullmatch(f"gqa-convert: {expected}\n", done.err), done.err
        assert checkpoints.snapshot(tmp_path) == before


def test_another_precision_is_advised_for_nan_only_if_it_is_not_in_use(
    small: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    broken(model, f"{LAST}.k_proj.weight", torch.nan)
    (tmp_path / "text.txt").write_text(counting(200))

    words = ("--method", "calibrated", "--data", tmp_path / "text.txt", "--context", 16)
    for precision, advised in (("bfloat16", True), ("float32", False)):
        done = checkpoints.run(model, "-g", 2, *words, "--tokens", 64, "--precision", precision)
        assert "computes NaN or Inf on the calibration text; " in done.err
        assert ("pass --precision float32" in done.err) is advised


def test_damaged_state_is_named(small: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.gqa-work"
    RunDirectory(work, "finished layers").claim()
    (work / "state.safetensors").write_text("garbage")
    text = ("--tokens", 256, "--context", 16)
    words = (small, "-o", tmp_path / "out", "-g", 2, *SHORT_REFINEMENT, *text)
    done = checkpoints.run(*words)
    done.expect(2, says=f"{work / 'state.safetensors'} is damaged; start over with --overwrite")
    assert checkpoints.run(*words, "--overwrite").code == 0


def test_maps_of_text_are_kept_until_something_is_made_of_them(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that is stopped while it writes is not calibrated again; maps of weights do not
    stay behind.
    """
    text, left = ("calibrated", "--tokens", 256, "--context", 16), [".out.gqa-work"]
    for method, seconds, names in ((("procrustes",), 0, []), (text, 99, []), (text, 0, left)):
        with monkeypatch.context() as patch:
            # Whether a layer is stored as soon as it is done, and Ctrl-C before the result is
            # written
            patch.setattr("gqa.convert.merge.finished_layers._INTERVAL", seconds)
            patch.setattr(
                "gqa.convert.api.ConvertedCheckpoint.write", Mock(side_effect=KeyboardInterrupt())
            )
            done = checkpoints.run(small, "-o", tmp_path / "out", "-g", 2, "--method", *method)
        done.expect(130)
        assert [path.name for path in tmp_path.iterdir()] == names
        assert (
            "stored layers and finished batches of generated text are kept, the same command "
            "continues after them" in done.err
        )
    with monkeypatch.context() as patch:  # a refusal leaves what an earlier run stored
        # A refusal after the directory of the run is opened
        patch.setattr(
            "gqa.convert.merge.calibrate_model.Calibrator", Mock(side_effect=RefusedError("no"))
        )
        assert checkpoints.run(small, "-o", tmp_path / "out", "-g", 2, "--method", *text).code == 2
    done = checkpoints.run(small, "-o", tmp_path / "out", "-g", 2, "--method", *text)
    assert "continues   after layer 2 of 2, where a run was stopped" in done.out + done.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_layer_that_cannot_compute_is_refused_at_its_first_run(tmp_path: Path) -> None:
    """A router that asks for more experts than there are."""
    model = tiny_checkpoint(tmp_path / "mixtral", "mixtral")
    (tmp_path / "text.txt").write_text(counting())
    edit_json(model / "config.json", lambda config: config.update(num_experts_per_tok=99))
    text = ("--data", tmp_path / "text.txt", "--tokens", 256, "--context", 16)
    check_refused(
        checkpoints.run(model, "-g", 1, "-o", tmp_path / "out", "--method", "calibrated", *text),
        "a layer MixtralDecoderLayer cannot be run layer by layer: ",
        "; use --method first, mean",
    )


NO_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 GiB")
MOST = (
    "out of memory on cpu: a layer with 64 blocks of 16 tokens does not fit; stop other "
    "programs that use it, lower --context, or"
)
EMBEDDING, MLP = "torch.nn.Embedding", "transformers.models.llama.modeling_llama.LlamaMLP"


def test_no_memory_for_measuring_layers_is_told_with_what_to_do(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for calibrating them."""
    # What torch raises for too little memory
    monkeypatch.setattr(f"{MLP}.forward", Mock(side_effect=NO_MEMORY))
    (tmp_path / "text.txt").write_text(counting())
    text = ("--data", tmp_path / "text.txt", "--tokens", 256, "--context", 16)
    check_refused(
        checkpoints.run(small, "-o", tmp_path / "out", "--kv-budget", 0.5, *text),
        "out of memory on cpu: a layer with 8 blocks of 16 tokens does not fit; stop other ",
    )


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        (EMBEDDING, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), MOST),
        (MLP, NO_MEMORY, MOST),
        (
            EMBEDDING,
            RuntimeError("no kernel"),
            "LlamaForCausalLM cannot be run layer by layer: no kernel",
        ),
        (EMBEDDING, RefusedError("our own words"), "our own words"),
    ],
)
def test_errors_in_a_model_are_told_as_they_are(
    source: Path,
    tmp_path: Path,
    where: str,
    error: Exception,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too little memory as that, with the batch that was tried; whatever else by what it says."""
    # What libraries raise for too little memory
    monkeypatch.setattr(f"{where}.forward", Mock(side_effect=error))
    with pytest.raises(RefusedError, match=expected):
        find_maps(plan_of(source), tmp_path / "maps", on_ids())
    assert not list(tmp_path.iterdir())
    # Which reads no text
    estimate_maps = "gqa.convert.merge.maps_from_weights.estimate_maps"
    monkeypatch.setattr(estimate_maps, Mock(side_effect=NO_MEMORY))
    with pytest.raises(RefusedError, match=r"^out of memory on cpu; pass another --device$"):
        find_maps(plan_of(source, "procrustes"), tmp_path / "maps", on_ids())
