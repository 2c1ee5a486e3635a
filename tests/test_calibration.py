"""Finding maps: deterministic, resumable, never worse than its start, and one line for whatever stands in its way."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from embedded import SOURCE
from safetensors.torch import load_file, save_file
from scrambled import Ids, on_ids, relative
from test_families import attention_of, write_checkpoint
from test_families import load as load_tiny
from tiny_models import TINY, build, inputs, logits
from torch import Tensor

from gqa.convert import Plan, RefusedError, calibrate_cli, convert_checkpoint, plan_conversion
from gqa.convert.align.calibration import Calibrator
from gqa.convert.align.closed_form import (
    LayerResult,
    Task,
    closed_form,
    output_roots,
    position_weights,
    significance_of,
)
from gqa.convert.align.find_maps import Silent, find_maps, with_maps
from gqa.convert.align.refine import Calls, Refinement, refine
from gqa.convert.maps import HeadMaps
from gqa.convert.maps_file import join_maps, save_maps

SHORT = Refinement(steps=8, batch=8, heldout=0.25)


class Told(Silent):
    """Keeps the errors of the layers, and stops after some of them."""

    def __init__(self, stop_after: int = 0) -> None:
        self.errors: list[float] = []
        self.warnings: list[str] = []
        self._stop_after = stop_after

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def layer(self, index: int, layers: int, error: float) -> None:
        self.errors.append(error)
        if index == self._stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(build(TINY["llama+bias"], 4), tmp_path_factory.mktemp("source"))


def plan_of(source: Path, method: str = "calibrated", groups: int = 2) -> Plan:
    return plan_conversion(source, groups, method=method, headers_only=False)


def layer_errors(source: Path, groups: int = 2, **how: Any) -> list[float]:
    """What every layer loses on the ids that it was calibrated on."""
    calibrator = Calibrator(plan_of(source, groups=groups), Ids().ids(), on_ids(**how))
    return [result.error for layer in range(calibrator.layers) if (result := calibrator.run(layer))]


def test_fewer_heads_lose_more(source: Path) -> None:
    """Random heads cannot be merged for nothing, and the error is a share of the source's own output."""
    two, one = layer_errors(source), layer_errors(source, groups=1)
    assert all(0.001 < few < fewer < 1 for few, fewer in zip(two, one, strict=True))


@pytest.mark.parametrize("name", ["llama+bias", "gpt_oss", "qwen2_vl_text"])
def test_batches_do_not_matter(name: str, tmp_path: Path) -> None:
    """Sums over batches, the last one smaller, with masks and positions for each size."""
    directory = write_checkpoint(build(TINY[name], 4), tmp_path / "source")
    assert layer_errors(directory) == pytest.approx(layer_errors(directory, batch=24), rel=1e-4)


def test_a_drift_is_in_units_of_what_attention_adds(tmp_path: Path) -> None:
    """Granite adds half of it: as if W_O and the MLP's last matrix were half as large."""
    tiny, errors = TINY["granite"], []
    for multiplier in (0.5, 1.0):
        model = build(replace(tiny, options={**tiny.options, "residual_multiplier": multiplier}), 4)
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data *= 0.5 / multiplier
        errors.append(layer_errors(write_checkpoint(model, tmp_path / str(multiplier))))
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


def test_what_an_error_of_scores_does_without_a_mask() -> None:
    """Causal layers are given no mask either; in others the first query sees all keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8, generator=generator) for _ in range(3))
    roots = output_roots(torch.randn(2, 8, 8, generator=generator))
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for causal in (True, False):
        mask = everything.tril() if causal else everything
        assert torch.equal(
            significance_of(q, k, v, None, 0.3, roots, causal), significance_of(q, k, v, mask, 0.3, roots)
        )
    assert significance_of(q, k, v, None, 0.3, roots)[0, :, 0].abs().max() < 1e-6  # one key takes all
    assert significance_of(q, k, v, None, 0.3, roots, False)[0, :, 0].min() > 1e-6


def test_each_layer_is_given_what_the_converted_ones_before_it_give(source: Path) -> None:
    """The stream of the calibrator is what the converted model computes."""
    calibrator = Calibrator(plan_of(source), Ids().ids(), on_ids())
    for layer in range(calibrator.layers):
        calibrator.run(layer)
    out = convert_checkpoint(source, 2, source.parent / "stream", method="calibrated", calibration=on_ids()).out
    found: list[Tensor] = []
    model = load_tiny(TINY["llama+bias"], out, "sdpa")
    model.get_submodule("model.layers")[-1].register_forward_hook(lambda _, args, output: found.append(output))  # type: ignore[index]
    with torch.no_grad():
        model(input_ids=Ids().ids())
    assert relative(calibrator.streams.converted, found[0]) < 1e-5
    assert relative(calibrator.streams.source, found[0]) > 1e-2


@pytest.mark.parametrize("method", ["calibrated", "refined", "aligned"])
def test_the_same_options_give_the_same_file(source: Path, tmp_path: Path, method: str) -> None:
    files = []
    for number, seed in enumerate((0, 0, 1)):
        options = on_ids(refinement=SHORT, text=Ids(seed=seed))
        files.append(find_maps(plan_of(source, method), tmp_path / f"{number}.safetensors", options, Silent()).path)
    one, again, other = (file.read_bytes() for file in files)
    assert one == again
    assert (one == other) == (method == "aligned")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(file.name for file in files)


@pytest.mark.parametrize("method", ["calibrated", "refined"])
def test_goes_on_where_it_was_interrupted(source: Path, tmp_path: Path, method: str) -> None:
    """Bit for bit what a run without interruption gives; other options are refused until --overwrite."""
    plan, options = plan_of(source, method), on_ids(refinement=SHORT)
    whole = find_maps(plan, tmp_path / "whole.safetensors", options, Silent()).path
    path = tmp_path / "parts.safetensors"
    with pytest.raises(KeyboardInterrupt):
        find_maps(plan, path, options, Told(stop_after=1))
    assert not path.exists()
    with pytest.raises(RefusedError, match=r"unfinished run with ridge 0\.03, not 0\.5; run it to its end, or start"):
        find_maps(plan, path, replace(options, ridge=0.5), Silent())
    told = Told()
    find_maps(plan, path, options, told)
    assert len(told.errors) == 1, "the first layer was not done again"
    assert path.read_bytes() == whole.read_bytes()
    with pytest.raises(RefusedError, match=r"parts\.safetensors exists; give another name or --overwrite"):
        find_maps(plan, path, options, Silent())
    with pytest.raises(KeyboardInterrupt):
        find_maps(plan, path, options, Told(stop_after=1), overwrite=True)
    assert path.read_bytes() == whole.read_bytes(), "the old file stays until there is a new one"
    find_maps(plan, path, replace(options, ridge=0.5), Silent(), overwrite=True)
    assert path.read_bytes() != whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.safetensors", "whole.safetensors"]


_STOPPED = """
import os, sys
from gqa.convert.align.calibration import Calibrator
from gqa.convert.cli import main
number, run = int(sys.argv.pop(1)), Calibrator.run
def stopped(self, layer, *rest):
    if layer == 1:
        os.kill(os.getpid(), number)
    return run(self, layer, *rest)
Calibrator.run = stopped
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_goes_on_where_it_was_stopped(
    small: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refining two layers takes hours: the first is not done again, and the result is the same."""
    text, out, run, layers = tmp_path / "text.txt", tmp_path / "out", Calibrator.run, []
    text.write_text("words " * 999)

    def words(output: Path) -> tuple[Any, ...]:
        return (small, "-g", 2, "--method", "refined", "--refine-steps", 2, "--calibration", text, "-q", "-o", output,
                "--calibration-length", 16, "--calibration-tokens", 256)  # fmt: skip

    command = [sys.executable, "-c", _STOPPED, str(int(number)), *map(str, words(out))]
    stopped = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert stopped.returncode in (130, 143, -signal.SIGKILL), stopped.stderr
    assert not out.exists()
    monkeypatch.setattr(Calibrator, "run", lambda own, layer, *rest: layers.append(layer) or run(own, layer, *rest))
    for place in (out, tmp_path / "whole"):
        done = checkpoints.run(*words(place))
        assert (done.code, done.err) == (0, "")
    assert layers == [1, 0, 1]
    one, other = (load_file(place / "model.safetensors") for place in (out, tmp_path / "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt", "whole"]


def test_maps_are_kept_until_something_was_made_of_them(source: Path, tmp_path: Path) -> None:
    """A conversion that fails is not calibrated again; nor do two do it at a time, or find what another was told."""
    plan, out, options = plan_of(source), tmp_path / "out", on_ids()
    with pytest.raises(OSError, match="no space"), with_maps(plan, out, options, Silent()):
        raise OSError("no space")
    told, other = Told(), replace(options, ridge=0.5)
    with pytest.raises(RefusedError, match="unfinished run with ridge"), with_maps(plan, out, other, told):
        pass
    with with_maps(plan, out, options, told) as found:
        assert found.merging.maps
        assert told.errors == []
        with pytest.raises(RefusedError, match=r"another run is finding maps for .*; wait for it or give another -o"):
            find_maps(plan, out, options, told)
    with with_maps(plan, out, other, told, overwrite=True):
        assert len(told.errors) == 2
    assert not list(tmp_path.iterdir())


def test_layers_are_joined_without_holding_them(tmp_path: Path) -> None:
    """Byte for byte what is written at once, in a memory that does not grow with the layers."""
    generator = torch.Generator().manual_seed(0)
    maps = {
        f"m{layer}": HeadMaps(*(torch.randn(2, 8, 16, generator=generator) for _ in range(2)), order=(1, 0))
        for layer in range(4)
    }
    weights = {f"w{layer}": torch.randn(6_000_000, generator=generator) for layer in range(4)}
    told = {"method": "refined", "groups": 2}
    save_maps(tmp_path / "whole", maps, weights, told)
    for layer in range(4):
        of = {f"m{layer}": maps[f"m{layer}"]}
        save_maps(tmp_path / f"{layer}.safetensors", of, {f"w{layer}": weights[f"w{layer}"]}, told)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    join_maps(tmp_path / "joined", sorted(tmp_path.glob("*.safetensors")), told)
    assert resident("VmHWM") - before < 12 << 20
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()


def resident(key: str) -> int:
    """Bytes of memory, by the name that Linux has for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# ---------------------------------------------------------------------------------------------- refinement


@pytest.mark.parametrize("name", ["diffllama", "qwen3_5_text", "afmoe", "molmo2_text", "mixtral"])
def test_refinement_lowers_the_error(name: str, tmp_path: Path) -> None:
    """Of types without a known symmetry from the mean, of others from the closed form; and the result loads."""
    tiny = TINY[name]
    directory = write_checkpoint(build(tiny, 4), tmp_path / "source")
    steps = (
        Refinement(steps=1, learning_rate=1e-9, heldout=0.25),
        Refinement(steps=40, heldout=0.25),
    )
    plan, text = plan_of(directory, "refined"), Ids(high=tiny.tokens, count=256)
    told = [Told() for _ in steps]
    for how, heard in zip(steps, told, strict=True):
        find_maps(plan, tmp_path / f"{how.steps}.safetensors", on_ids(refinement=how, text=text), heard)
    before, after = ([error for error in heard.errors if error == error] for heard in told)
    assert len(before) == len(after) > 0
    assert all(new < old for new, old in zip(after, before, strict=True))
    out = convert_checkpoint(directory, 2, tmp_path / "out", maps=tmp_path / "40.safetensors").out
    given = inputs(tiny)
    expected = logits(tiny, load_tiny(tiny, directory, attention_of(tiny.model_type)), given)
    mean = convert_checkpoint(directory, 2, tmp_path / "mean").out
    refined, pooled = (
        float((logits(tiny, load_tiny(tiny, place, attention_of(tiny.model_type)), given) - expected).square().mean())
        for place in (out, mean)
    )
    assert refined < pooled


def linear(read: int, rows: int, blocks: int = 32) -> tuple[torch.nn.Linear, Tensor, dict[str, Tensor]]:
    """A module, (blocks, 5, read) that it is given, and its parameters."""
    torch.manual_seed(0)
    module, hidden = torch.nn.Linear(read, rows), torch.randn(blocks, 5, read)
    return module, hidden, {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_refinement_is_never_worse_than_its_start() -> None:
    """A learning rate that breaks everything leaves the start."""
    module, hidden, start = linear(4, 4)
    targets, how = module(hidden).detach() + 0.1 * torch.randn(32, 5, 4), Refinement(16, batch=8, learning_rate=1e4)
    best, first, least = refine(module, start, Calls(hidden), targets, torch.ones(32, 5), how)
    assert least == first
    assert all(torch.equal(best[name], start[name]) for name in start)


def test_refinement_does_not_depend_on_the_size_of_weights() -> None:
    """The same matrix and vector a hundred times as large, towards what is a hundred times as large."""
    module, hidden, start = linear(8, 8)
    targets = module(hidden).detach() + hidden @ torch.randn(8, 8) * 0.1 + 0.1
    found = []
    for size in (1.0, 100.0):
        scaled, wanted = {name: size * tensor for name, tensor in start.items()}, size * targets
        calls, how = Calls(hidden), Refinement(steps=50, batch=8)
        found.append(refine(module, scaled, calls, wanted, torch.ones(wanted.shape[:2]), how))
    (_, first, least), (_, large_first, large_least) = found
    assert large_first == pytest.approx(first, rel=1e-4)
    assert large_least == pytest.approx(least, rel=0.02)
    assert least < 0.5 * first


@pytest.mark.parametrize("rows", [4, 64])
def test_steps_are_as_large_as_said(rows: int) -> None:
    """Of the size of a matrix, tall or wide; what is zero moves as well."""
    module, hidden, start = linear(16, rows, blocks=8)
    start["bias"] = torch.zeros(rows)
    targets, how = hidden @ torch.randn(16, rows) + 1, Refinement(steps=1, batch=8, learning_rate=0.01)
    found, first, least = refine(module, start, Calls(hidden), targets, torch.ones(8, 5), how)
    assert least < first
    moved = (found["weight"] - start["weight"]).norm() / start["weight"].norm()
    assert 0.5 * how.learning_rate < moved < 1.5 * how.learning_rate
    assert found["bias"].abs().min() > 0


def test_refinement_looks_where_errors_count() -> None:
    """Targets that are wrong at one position: nothing is learnt from them where it counts nothing."""
    module, hidden, start = linear(4, 4)
    calls = Calls(hidden)
    targets, counts = module(hidden).detach(), torch.ones(32, 5)
    targets[:, 0] += 100.0
    counts[:, 0], how = 0.0, Refinement(steps=16, batch=8)
    _, first, _ = refine(module, start, calls, targets, counts, how)
    assert first < 1e-12
    _, first, least = refine(module, start, calls, targets, torch.ones(32, 5), how)
    assert least < first, "there is something to learn where it counts"


def test_held_out_blocks_are_not_trained_on() -> None:
    """Whichever the seed has chosen."""
    module, hidden = torch.nn.Linear(4, 4), torch.arange(32.0)[:, None, None].expand(32, 5, 4)
    seen: dict[bool, set[float]] = {}
    module.register_forward_pre_hook(
        lambda _, args: seen.setdefault(torch.is_grad_enabled(), set()).update(args[0][:, 0, 0].tolist())
    )
    start, heldout = module.state_dict(), []
    for seed in (0, 1):
        seen.clear()
        how = Refinement(steps=16, batch=8, heldout=0.25, seed=seed)
        refine(module, start, Calls(hidden), torch.ones(32, 5, 4), torch.ones(32, 5), how)
        assert len(seen[False]) == 8
        assert seen[True] == set(range(32)) - seen[False]
        heldout.append(seen[False])
    assert heldout[0] != heldout[1]


# ------------------------------------------------------------------------------------- positions out of the ordinary


def test_scores_count_by_what_they_move() -> None:
    """The sum over keys of |a W_O (v - o)|^2, from its parts; a hidden key counts nothing."""
    torch.manual_seed(0)
    q, k, v, w_o = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6), torch.randn(4, 6, 16)
    mask = torch.ones(5, 5).tril().bool()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, 3:, 0] = False
    found = significance_of(q, k, v, mask, 0.3, output_roots(w_o))
    for head in range(4):
        keys, values = k[:, head // 2], v[:, head // 2] @ w_o[head]
        paid = (0.3 * q[:, head] @ keys.mT).masked_fill(~mask[:, 0], -torch.inf).softmax(-1)
        away = (values[:, None] - (paid @ values)[:, :, None]).square().sum(-1)
        torch.testing.assert_close(found[:, head], (paid.square() * away).sum(-1), rtol=1e-4, atol=1e-5)


def test_an_error_counts_by_the_size_of_the_stream() -> None:
    stream = torch.randn(3, 7, 16)
    stream[:, 0] *= 100
    counts = position_weights(stream)
    assert float(counts.mean()) == pytest.approx(1.0)
    assert torch.allclose(counts * stream.square().mean(-1), (counts * stream.square().mean(-1))[0, 0])


@pytest.mark.parametrize("counted", [0.0, 1.0])
def test_the_closed_form_looks_where_errors_count(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: float
) -> None:
    """What is wanted at the first position is spoiled: it decides nothing where it counts nothing."""
    written = []
    for spoil in (0.0, 100.0):

        def spoiled(task: Task, strength: float, search: bool, spoil: float = spoil) -> LayerResult:
            inputs, counts = task.wanted.inputs.clone(), task.wanted.counts.clone()
            inputs[:, 0] += spoil
            counts[:, 0] *= counted
            wanted = replace(task.wanted, inputs=inputs, counts=counts)
            return closed_form(replace(task, wanted=wanted), strength, search)

        monkeypatch.setattr("gqa.convert.align.calibration.closed_form", spoiled)
        out = convert_checkpoint(source, 2, tmp_path / str(spoil), method="calibrated", calibration=on_ids()).out
        written.append(load_tiny(TINY["llama+bias"], out).get_parameter("model.layers.0.self_attn.o_proj.weight"))
    assert torch.equal(*written) is (counted == 0)


@pytest.mark.parametrize(("steps", "batch"), [(0, 8), (-1, 8), (8, 0)])
def test_steps_of_refinement(steps: int, batch: int) -> None:
    with pytest.raises(RefusedError, match=f"cannot be refined in {steps} steps of {batch} blocks"):
        Refinement(steps=steps, batch=batch)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "falcon", "mllama_text_model"])
def test_layers_that_need_more_than_hidden_states(name: str, tmp_path: Path) -> None:
    """Embeddings of each layer's own, layers that read others' keys, other attention functions: refused in one line."""
    directory = write_checkpoint(build(TINY[name], 4), tmp_path / "source")
    with pytest.raises(RefusedError, match=r"cannot be run layer by layer|several attention modules") as told:
        convert_checkpoint(directory, 2, tmp_path / "out", method="refined", calibration=on_ids(refinement=SHORT))
    assert "\n" not in str(told.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("autocast", [False, True])
def test_layers_in_16_bits_are_refined(source: Path, tmp_path: Path, dtype: str, autocast: bool) -> None:
    how = replace(SHORT, autocast=autocast)
    before, after = Told(), Told()
    for method, told in (("calibrated", before), ("refined", after)):
        find_maps(plan_of(source, method), tmp_path / method, on_ids(refinement=how, dtype=dtype), told)
    assert all(error < 1 for error in after.errors)
    assert after.errors != before.errors


@pytest.mark.parametrize("quiet", [False, True])
def test_a_job_tells_how_far_it_is(quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Lines on stderr where nobody looks at a bar, not more often than is said."""
    monkeypatch.setattr(calibrate_cli, "_LOG_SECONDS", 0.0)
    with calibrate_cli.Bar(quiet) as bar:
        bar.update(64)
        bar.stage("calibrating", 256)
        bar.layer(1, 2, 0.25)
        bar.update(128)
        monkeypatch.setattr(calibrate_cli, "_LOG_SECONDS", 60.0)
        bar.update(128)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" | ")[0] for line in lines] == (
        [] if quiet else ["sampling | 64 tokens", "layer 1/2, error 0.25 | 128 tokens"]
    )


def test_what_the_text_does_not_determine_is_told(source: Path, tmp_path: Path) -> None:
    """Two heads of the second layer see values that are zero; then fewer positions than W_O reads dimensions."""
    dead = shutil.copytree(source, tmp_path / "dead")
    for file in dead.glob("*.safetensors"):
        tensors = load_file(file)
        for name in ("weight", "bias"):
            if (tensor := tensors.get(f"model.layers.1.self_attn.v_proj.{name}")) is not None:
                tensor[: len(tensor) // 2] = 0
        save_file(tensors, file, metadata={"format": "pt"})
    told = [Told() for _ in range(3)]
    find_maps(plan_of(source), tmp_path / "0", on_ids(), told[0])
    find_maps(plan_of(dead), tmp_path / "1", on_ids(), told[1])
    find_maps(plan_of(source), tmp_path / "2", on_ids(text=Ids(count=1)), told[2])
    assert told[0].warnings == []
    assert told[1].warnings == [
        "layer 1: nothing comes from query heads 0, 1 on the calibration text; W_O is not fitted there"
    ]
    said = "W_O reads 32 dimensions and is fitted to 16 positions, the ridge decides the rest; give more"
    assert told[2].warnings == [f"layer {layer}: {said} --calibration-tokens" for layer in (0, 1)]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the embedded tokenizer."""
    tiny = replace(TINY["llama"], options={"vocab_size": 4096})
    directory = tmp_path_factory.mktemp("small") / "model"
    build(tiny, 4).save_pretrained(directory)
    for file in SOURCE.glob("*token*"):
        shutil.copyfile(file, directory / file.name)
    return directory


def broken(directory: Path, name: str, value: float) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def without_tokenizer(directory: Path) -> None:
    for file in directory.glob("*token*"):
        file.unlink()


def narrower(directory: Path) -> None:
    """An embedding with fewer rows than the tokenizer has tokens."""
    tensors = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:50].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    checkpoints.edit_json(directory / "config.json", lambda config: config.update(vocab_size=50))


def unstarted(directory: Path) -> None:
    checkpoints.edit_json(directory / "config.json", lambda config: config.update(bos_token_id=None, eos_token_id=None))


LAST = "model.layers.1.self_attn"
CASES: dict[str, tuple[Callable[[Path], None] | None, str | None, str]] = {
    # What is done to the model, the text (None: self), what is said.
    "short": (None, "a few words", r".*text\.txt has \d tokens, fewer than one block of 16; give more text"),
    "empty": (None, "", r".*text\.txt holds no text: .*"),
    "tokenizer": (without_tokenizer, "words " * 99, r"model has no tokenizer; copy .*, or use self"),
    "vocabulary": (narrower, "words " * 99, r"the tokenizer of model gives token \d+, its embedding has 50; .*"),
    "start": (unstarted, None, r".* has neither BOS nor EOS to start a sample from; give text instead of self"),
    **{
        f"{value}-{name}": (
            lambda directory, name=name, value=value: broken(directory, f"model.layers.{name}.weight", value),
            "words " * 99,
            f"layer {name[0]} computes NaN or Inf on the calibration text; the model is broken there",
        )
        for name in ("0.self_attn.k_proj", "1.self_attn.o_proj", "0.mlp.down_proj")
        for value in (torch.nan, torch.inf)
    },
    "nan-self": (
        lambda directory: broken(directory, f"{LAST}.k_proj.weight", torch.nan), None,
        r".* (computes NaN or Inf|cannot be sampled from).*",
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", ["calibrated", "refined"])
@pytest.mark.parametrize("case", CASES)
def test_one_line_for_what_cannot_be_calibrated(
    small: Path, tmp_path: Path, case: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what is left there would be seen, too
    change, text, expected = CASES[case]
    model = Path(shutil.copytree(small, tmp_path / "model"))
    if change:
        change(model)
    file = tmp_path / "text.txt"
    file.write_text(text or "")
    before = checkpoints.snapshot(tmp_path)
    words = ("-g", 2, "--method", method, "--calibration", "self" if text is None else file, "--calibration-length", 16,
             "--calibration-tokens", 64, "--refine-steps", 2)  # fmt: skip
    for program, output in (("gqa-calibrate", "maps.safetensors"), ("gqa-convert", "out")):
        done = checkpoints.run(model, "-o", tmp_path / output, *words, program=program)
        assert done.code == 2, done.err
        assert done.out == ""
        assert re.fullmatch(f"{program}: {expected}\n", done.err), done.err
        assert checkpoints.snapshot(tmp_path) == before


def fails(error: Exception) -> Callable[..., None]:
    def forward(*given: object, **named: object) -> None:
        raise error

    return forward


NO_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
)
MOST = (
    r"out of memory on cpu with 64 blocks of 16 tokens in a layer at a time \(16 to refine it\); lower --calibration-"
)
EMBEDDING, MLP = "torch.nn.Embedding", "transformers.models.llama.modeling_llama.LlamaMLP"


@pytest.mark.parametrize(
    ("where", "error", "expected"),
    [
        (EMBEDDING, NO_MEMORY, MOST),
        (EMBEDDING, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), MOST),
        (MLP, NO_MEMORY, MOST),
        (MLP, MemoryError(), MOST),
        (EMBEDDING, RuntimeError("no kernel"), "LlamaForCausalLM cannot be run layer by layer: no kernel"),
        (EMBEDDING, RefusedError("our own words"), "our own words"),
    ],
)
def test_errors_in_a_model_are_told_as_they_are(
    source: Path, tmp_path: Path, where: str, error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory as that, with the batch that was tried; whatever else by what it says."""
    monkeypatch.setattr(f"{where}.forward", fails(error))
    with pytest.raises(RefusedError, match=expected):
        find_maps(plan_of(source), tmp_path / "maps", on_ids(), Silent())
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    find_maps(plan_of(source), tmp_path / "maps", on_ids(), Silent())


@pytest.mark.parametrize("method", ["procrustes", "aligned"])
@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_broken_weights_are_not_aligned(small: Path, tmp_path: Path, method: str, part: str) -> None:
    model = Path(shutil.copytree(small, tmp_path / "model"))
    broken(model, f"{LAST}.{part}.weight", torch.nan)
    done = checkpoints.run(model, "-g", 2, "--method", method, "-o", tmp_path / "out")
    assert done.code == 2
    assert done.err == f"gqa-convert: {LAST} of model holds NaN or Inf; heads cannot be aligned by it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_sources_with_an_at_sign(small: Path, tmp_path: Path) -> None:
    """In a file's name it is no weight; behind one it is."""
    file = tmp_path / "me@home.txt"
    file.write_text("words " * 200)
    words = ("-g", 2, "-o", tmp_path / "maps", "--calibration-length", 16, "--calibration-tokens", 64, "-q")
    for given in (file, f"{file}@2,self@1"):
        done = checkpoints.run(small, *words, "--calibration", given, "--overwrite", program="gqa-calibrate")
        assert (done.code, done.err) == (0, "")
