"""The default method, which methods a model allows, what is said of that, and what they cost."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import check_refused, edit_tensors, llama, run, weights
from support.families import write_checkpoint
from support.pages import with_table
from support.patches import use_speed
from support.repository import ROOT
from support.tiny_models import TINY, build

from gqa.convert import api, estimate
from gqa.convert.api import plan_conversion
from gqa.convert.merge.options import MapsOptions
from gqa.convert.methods.calibrated import Calibrated
from gqa.convert.methods.table import METHODS
from gqa.convert.options import ConvertOptions
from gqa.convert.summary import size
from gqa.core import devices
from gqa.core.errors import RefusedError
from gqa.models import tokenizer

PAGE = ROOT / "docs/methods.md"
HEADER = (
    "| `--method` | fitted to | time for 7B | how KV heads are merged "
    "| perplexity ratio, example model, 8 -> 2 KV heads |\n|---|---|---|---|---|\n"
)

# Of tiny models: what `calibrated` says of those that it cannot convert, and which methods they
# allow.
MARK = "  <- this plan; from the speed of cpu right now"
ALL = tuple(name for name, method in METHODS.items() if not method.is_control)
POOLING = tuple(name for name in ALL if METHODS[name].reads == "nothing")
WITHOUT_ALIGNED = tuple(name for name in ALL if name != "aligned")
ALLOWED = {
    **dict.fromkeys(("llama", "qwen3", "phi", "starcoder2", "gemma", "gemma2", "olmo2"), ("", ALL)),
    **dict.fromkeys(("mixtral", "falcon_h1"), ("", WITHOUT_ALIGNED)),
    "gemma3n_text": ("cannot be run layer by layer", POOLING),
    **dict.fromkeys(("qwen3_next", "bitnet"), ("cannot align the heads", (*POOLING, "refined"))),
}


def methods_page() -> str:
    """docs/methods.md with its table of methods written anew, the best first."""
    rows = [
        (
            f"`{method.name}`",
            method.reads,
            method.cost,
            method.result,
            method.example_ratio or "not measured",
        )
        for method in reversed(METHODS.values())
    ]
    return with_table(PAGE.read_text(encoding="utf-8"), HEADER, rows)


def test_the_page_of_methods_shows_every_method() -> None:
    """`python tests/test_choice.py` writes the page anew."""
    message = "the page is old: run python tests/test_choice.py"
    assert PAGE.read_text(encoding="utf-8") == methods_page(), message


def tiny(name: str, place: Path) -> Path:
    return write_checkpoint(build(TINY[name], 4), place)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_method_that_a_model_does_not_allow_is_refused_with_those_that_it_does(
    name: str, tmp_path: Path
) -> None:
    says, allowed = ALLOWED[name]
    model = tiny(name, tmp_path / "m")
    assert (
        tuple(one.name for one in plan_conversion(model, 2, method="mean").available_methods)
        == allowed
    )
    if says:
        names = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        refused = run("-g", 2, "--method", "calibrated", model)
        check_refused(refused, says, f"; use --method {names}\n")
    if "aligned" not in allowed:
        says = says or "needs layers of attention and one MLP, but m"
        refused = run("-g", 2, "--method", "aligned", model)
        check_refused(refused, says if "align" in says else "", "; use --method first")
    unmerged = plan_conversion(model, 4)
    assert unmerged.method.name == "none", "nothing is refused where nothing is merged"


@pytest.mark.parametrize("name", [name for name in ALLOWED if "refined" in ALLOWED[name][1]])
def test_the_default_is_refined_where_the_model_allows_it(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path / "m")
    assert ConvertOptions("m", kv_heads=2).method == "refined"
    assert plan_conversion(model, 2).method.name == "refined"


def test_a_model_that_the_default_cannot_convert_is_refused_with_what_can(tmp_path: Path) -> None:
    model = tiny("gemma3n_text", tmp_path / "m")
    check_refused(run("-g", 2, model), "cannot be run layer by layer", "; use --method first or")


def test_aligned_is_refused_where_one_layer_is_unlike_the_others(tmp_path: Path) -> None:
    """A matrix or a norm too many in the last layer: what it reads is not known."""
    model = llama(tmp_path / "m", shards=1)
    assert plan_conversion(model, 2, method="aligned").method.name == "aligned"
    for name, tensor in (("mlp.experts", torch.zeros(4, 32)), ("other_layernorm", torch.ones(32))):
        edit_tensors(
            model,
            lambda _, name=name, more=tensor: weights() | {f"model.layers.1.{name}.weight": more},
        )
        with pytest.raises(RefusedError, match="needs layers of attention and one MLP"):
            plan_conversion(model, 2, method="aligned")


def test_what_a_run_takes_is_said_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is long, also the method that is quick; where memory is short, a warning, by
    --dry-run too.
    """
    model = llama(tmp_path / "m", shards=1)
    words = ("-g", 2, "--method", "procrustes", "-o", tmp_path / "out", "--overwrite", model)
    done = run(*words)
    assert done.out.startswith("estimate    about 5 s on cpu, from its speed right now\nmodel  ")
    assert done.complaints == ""
    # A device of 1 MiB
    monkeypatch.setattr(devices, "total_memory", lambda device: 1 << 20)
    warning = r"warning: --method procrustes takes about \d+\.\d MiB of memory; cpu has 1.0 MiB\n"
    for more in ((), ("--dry-run",), ("-q",), ("-q", "--dry-run")):
        assert re.fullmatch(warning, run(*words, *more).complaints)
    use_speed(monkeypatch, 1e4)
    # After what is printed first
    # The estimate alone: nothing is converted
    monkeypatch.setattr(api, "convert", lambda *arguments, **options: sys.exit(3))
    done = run("-g", 2, model)
    done.expect(3)
    assert done.out.count("\n") == 1
    assert re.match(
        r"estimate    about \d+ days on cpu, from its speed right now; --method calibrated takes ",
        done.out,
    )
    assert "; pass text with --data to need less, because no text is generated then\n" in done.err
    # The checkpoint has no tokenizer, and only the warning matters
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *arguments, **options: None)
    assert run("-g", 2, "--data", "stdlib:train", model).err.endswith(
        "of memory; cpu has 1.0 MiB\n"
    )
    calibrated = ("-g", 2, "--method", "calibrated")
    done = run(*calibrated, model)
    assert re.match(
        r"estimate    about \d+ days on cpu, from its speed right now; --method aligned takes ",
        done.out,
    )
    done = run(*calibrated, tiny("mixtral", tmp_path / "experts"))  # does not allow `aligned`
    assert re.fullmatch(r"estimate    about \d+ days on cpu, from its speed right now\n", done.out)


def test_a_control_that_computes_maps_is_estimated_and_compared_with_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place among the methods does not say how good it is."""

    class Control(Calibrated):
        is_control = True

    monkeypatch.setitem(METHODS, "calibrated", Control())
    model = llama(tmp_path / "m", shards=1)
    words = ("-g", 2, "--method", "calibrated", model)
    monkeypatch.setattr(devices, "total_memory", lambda device: 1 << 20)
    use_speed(monkeypatch, 1e4)
    planned = run(*words, "--dry-run")
    (marked,) = (line for line in planned.out.splitlines() if line.endswith(MARK))
    assert marked.startswith("estimate    calibrated  about ")
    assert "warning: --method calibrated takes about " in planned.err

    # The estimate alone: nothing is converted
    monkeypatch.setattr(api, "convert", lambda *arguments, **options: sys.exit(3))
    done = run(*words)
    done.expect(3)
    assert re.fullmatch(r"estimate    about \d+ days on cpu, from its speed right now\n", done.out)


def test_an_output_that_is_there_is_refused_before_anything_is_estimated(tmp_path: Path) -> None:
    model = llama(tmp_path / "m", shards=1)
    done = run("-g", 2, "--method", "procrustes", "-o", model.parent, model)
    check_refused(done, "", advice="")
    assert done.out == ""


def test_a_dry_run_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    """Text that does not exist or cannot be read; of the output it warns."""
    model, words = llama(tmp_path / "m"), ("-g", 2, "--dry-run")
    (tmp_path / "table.jsonl").write_text('{"body": "words"}\n')
    (tmp_path / "empty.txt").write_text("")
    problems = {
        "nothing.txt": "there is no file",
        "empty.txt": "has no text: all its files are empty",
        "table.jsonl": "has no column",
    }
    for name, says in problems.items():
        refused = [run(*words[:last], model, "--data", tmp_path / name) for last in (2, 3)]
        assert {check_refused(one, says, advice="") for one in refused} == {refused[0].err}
    text = tmp_path / "text.txt"
    text.write_text("words")
    check_refused(run(*words, model, "--data", text), "cannot load the tokenizer of m")
    check_refused(
        run(*words, model, "--tokens", 7),
        "--tokens 7 is less than one block of 256 tokens; pass at least 256",
    )
    for source in ("self", "self:plain"):
        check_refused(
            run(*words, model, "--data", f"{source}:100"),
            f"{source}:100 is less than one block of 256 tokens; pass {source}:256 or more",
        )
    done = run(*words, model, "-o", model)
    assert done.code == 0
    assert done.err.startswith(f"warning: the output directory {model} is the model's directory")


def test_a_dry_run_estimates_every_method_that_the_model_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading a weight: there is none in the file."""
    use_speed(monkeypatch, 1e6)
    model = llama(tmp_path / "m", shards=1)

    def estimates(*words: object) -> dict[str, dict[str, float]]:
        done = run("--kv-heads", 2, "--dry-run", "--json", *words)
        assert done.err.count("estimate    ") == (
            0 if "-q" in words else len(json.loads(done.out)["estimates"])
        )
        return dict(json.loads(done.out)["estimates"])

    before = estimates(model)
    assert list(before) == [*reversed(ALL)]
    for name in ("seconds", "memory_bytes"):
        values = [before[method][name] for method in ("mean", "aligned", "calibrated", "refined")]
        assert values == sorted(set(values))
    assert list(estimates("--method", "mean", tiny("bitnet", tmp_path / "d"))) == [
        "refined",
        *reversed(POOLING),
    ]
    use_speed(monkeypatch, 2e6)
    assert estimates("-q", model)["refined"]["seconds"] == pytest.approx(
        before["refined"]["seconds"] / 2, rel=0.01
    )


def test_a_dry_run_says_where_the_result_goes_its_size_and_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(tmp_path / "m", shards=1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 2**30))
    words = ("-g", 2, "--method", "mean", "--dry-run", model)
    total = plan_conversion(model, 2, method="mean").total_bytes
    for place, more in ((f"{model}-gqa2-mean", ()), ("there/out", ("-o", "there/out"))):
        planned = run(*words, *more).out
        assert f"\noutput      {place}: {size(total)}; 3.0 GiB free\n" in planned


def test_a_dry_run_says_the_free_space_of_an_output_that_it_refuses_too(tmp_path: Path) -> None:
    model = llama(tmp_path / "m", shards=1)
    for refused in (model, Path("/")):
        planned = run("-g", 2, "--method", "mean", "--dry-run", model, "-o", refused)
        planned.expect()
        assert re.search(rf"\noutput      {refused}: .* free\n", planned.out)
        assert planned.err.startswith("warning: ")


@pytest.mark.parametrize("method", ["mean", "refined"])
def test_a_dry_run_marks_the_method_of_the_plan_among_the_estimates(
    tmp_path: Path, method: str
) -> None:
    model = llama(tmp_path / "m", shards=1)
    planned = run("-g", 2, "--method", method, "--dry-run", model).out
    (marked,) = (line for line in planned.splitlines() if line.endswith(MARK))
    assert marked.startswith(f"estimate    {method} ")


@pytest.mark.parametrize(
    ("hours", "words"), [(1.9, "114 minutes"), (47, "47 hours"), (48, "2 days"), (1272, "53 days")]
)
def test_long_times_are_in_days(hours: float, words: str) -> None:
    assert estimate.duration(hours * 3600) == words


def test_the_memory_of_an_estimate_includes_the_process_itself(tmp_path: Path) -> None:
    """On a CPU: with Python, torch and transformers, which are most of it for a small model."""
    model = tiny("llama", tmp_path / "model")
    done = run(str(model), "-g", "2", "--method", "mean", "--dry-run", "--json")
    memory = json.loads(done.out)["estimates"]["mean"]["memory_bytes"]
    assert 150 * 2**20 < memory < 1.2 * devices.peak_memory() + 2**24
    assert f"{size(memory)} of memory" in done.err


def test_a_device_does_not_need_what_the_process_does() -> None:
    plan = SimpleNamespace(total_bytes=10, changed_tensors=[])
    method = METHODS["mean"]
    _, on_cpu = estimate.estimate(plan, method, MapsOptions(device="cpu"))  # type: ignore[arg-type]
    _, on_gpu = estimate.estimate(plan, method, MapsOptions(device="cuda"))  # type: ignore[arg-type]
    assert on_gpu == 0 < 150 * 2**20 < on_cpu


def test_the_width_of_a_config_does_not_size_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may state any width, of which a square matrix would not fit into memory."""
    monkeypatch.setattr(estimate, "_WIDEST", 64)
    assert estimate.measure_flops("cpu", 10**9) > 0


def test_warnings_of_a_dry_run_are_in_its_record(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "model")
    words = (str(model), "-g", "2", "--method", "mean", "--dry-run", "--json")
    assert json.loads(run(*words).out)["warnings"] == []
    run(str(model), "-g", "2", "--method", "mean")
    (warning,) = json.loads(run(*words).out)["warnings"]
    assert "model-gqa2-mean exists" in warning


def test_code_of_a_checkpoint_may_run_with_any_method(tmp_path: Path) -> None:
    """Its advice, gqa-eval and gqa-uptrain, needs the option too."""
    model = tiny("llama", tmp_path / "model")
    done = run(str(model), "-g", "2", "--method", "mean", "--trust-remote-code")
    assert done.code == 0
    assert "--trust-remote-code" in done.out


if __name__ == "__main__":
    PAGE.write_text(methods_page(), encoding="utf-8")
