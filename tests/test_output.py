"""Where a result may go, and wrong usage: refused in one line before a byte is written; its record
and model card.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from support import checkpoints
from support.checkpoints import MERGED, check_refused, leftovers, llama, run, snapshot
from support.custom_code import THEIRS
from support.families import all_tensors, write_checkpoint
from support.native_models import CASES
from support.tiny_models import TINY, build
from support.training import fresh_accelerator, tiny_checkpoint, write_corpus
from torch import Tensor

from gqa.checkpoint.output_directory import OutputDirectory
from gqa.convert.api import convert_checkpoint
from gqa.core.errors import OutputError, RefusedError
from gqa.models.card import BASE_CARD


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return llama(tmp_path / "m", side_files=False)


NO_PATHS = ("./nothing", "/nothing/there", "a/b/c", "../m\n")
NO_IDS = ("two words", "a\x1b[2Jb")  # nor paths
WRONG_USAGE = {
    "--kv-heads 3 m": "--kv-heads 3 does not divide the 4 KV heads of m; pass 1, 2 or 8",
    "--kv-heads 16 m": "--kv-heads 16 is more than the 8 query heads of m; pass 1, 2 or 8",
    **{
        f"--kv-heads {word} m": f"'{word}' is not a number of KV heads; pass a positive whole"
        for word in ("0", "-2", "two", "2.0", "1,two")
    },
    "-g2 m a b": "too many arguments: a b; m was read as MODEL, and all other values need the name "
    "of an option",
    "m '# a comment'": "too many arguments: # a comment; your shell passes comments on",
    "-g2 m --revision main": "--revision is for model ids",
    "m": "--kv-heads is missing; m has 4 KV heads: pass 1 or 2",
    "-g2": "pass the model: a directory with config.json, or a model id; see gqa-convert --help",
    "-g2 m --method refine": "did you mean refined?",
    "-g2 m/config.json": "config.json is not a directory; pass the one",
    "-g2 empty": "empty has no config.json; pass a checkpoint",
    "-g2 .": ". has no config.json; did you mean m?",
    "-g2 ./broken": "broken is not a directory; pass the one",
    **{
        f"-g2 {shlex.quote(path)}": "; pass a directory with config.json, or a model id"
        for path in NO_PATHS
    },
    **{
        f"-g2 {shlex.quote(name)}": "and it is not a model id (owner/name): Repo id"
        for name in NO_IDS
    },
}


@pytest.mark.parametrize("words", WRONG_USAGE)
def test_wrong_usage(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    before, says = snapshot(tmp_path), WRONG_USAGE[words]
    result = run(*shlex.split(words))
    check_refused(result, says, advice="")
    assert snapshot(tmp_path) == before


def test_refused_outputs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OUT for every way to get it wrong, and what is said."""
    root, ismount = model.parent, os.path.ismount
    (root / "volume").mkdir()
    # Only root may mount a volume
    monkeypatch.setattr(
        "os.path.ismount", lambda path: Path(path) == root / "volume" or ismount(path)
    )
    (root / "file").write_text("mine")
    (root / "full").mkdir()
    (root / "full" / "precious.txt").write_text("mine")
    for name, target in (("link", "full"), ("loose", "nowhere"), ("same", "m"), ("loop", "loop")):
        (root / name).symlink_to(target)
    cases: dict[str, tuple[object, str]] = {
        # What --overwrite would not remove: then it is not advised
        "exists": (root / "full", "full exists; choose another directory with -o\n"),
        "a file": (root / "file", "file exists and is not a directory"),
        "below a file": (
            root / "file" / "out",
            "file is not a directory that you may write to; choose another",
        ),
        "below a link to itself": (
            root / "loop" / "out",
            "loop is not a directory that you may write to",
        ),
        "where no files are made": ("/proc/out", "choose another directory with -o"),
        "a link": (root / "link", "is a symbolic link; pass the directory that it points to"),
        "a link to nothing": (root / "loose", "is a symbolic link"),
        "the model by another name": (
            root / "full" / ".." / "m" / "",
            "is the model's directory or inside it",
        ),
        "in the model by a link": (
            root / "same" / "deep" / "out",
            "is the model's directory or inside it",
        ),
        "around the model with dots": (f"{model}/..", "contains the model"),
        "a mount point": (root / "volume", "is a mount point; choose a directory in it"),
        "the root": ("/", "the root of a file system"),
        "too long": (root / ("x" * 300), "too long"),
    }
    before = snapshot(root)
    for name, (out, says) in cases.items():
        code = (
            1 if name.startswith("below") or name in ("where no files are made", "too long") else 2
        )
        for words in ([], ["--overwrite"]) if name != "exists" else ([],):
            check_refused(run(*MERGED, "-o", out, *words, model), says, code=code)
            assert snapshot(model.parent) == before, name
    (root / ".out.gqa-lock").mkdir()  # what is in the way only when it is entered
    says = f"cannot write beside {root / 'out'}: "
    check_refused(
        run(*MERGED, "-o", root / "out", model), says, "choose another directory with -o", code=1
    )


@pytest.mark.parametrize(
    "name", ["notes.txt", "runs/1.json", ".env", "model.safetensors", "link", "results.json"]
)
def test_overwrite_refuses_what_no_record_lists(model: Path, tmp_path: Path, name: str) -> None:
    """In a result, and alone; what the product wrote is replaced, also a copy of a file of that
    name.
    """
    out, report = tmp_path / "out", '{"files": ["results.json"]}'
    (model / "runs").mkdir()
    (model / "runs/0.json").write_text("{}")
    assert run(*MERGED, "-o", out, model).code == 0
    for place in (out, tmp_path / "other"):
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).symlink_to(model) if name == "link" else (place / name).write_text(report)
    before = snapshot(tmp_path)
    for place in (out, tmp_path / "other"):
        refused = run(*MERGED, "--overwrite", "-o", place, model)
        check_refused(refused, f"holds {name}, which --overwrite will not remove", "move it away")
    assert snapshot(tmp_path) == before
    (out / name).unlink()
    (out / "empty").mkdir()
    assert run(*MERGED, "--overwrite", "-o", out, model).code == 0
    assert not (out / "empty").exists()


def test_work_directory_that_is_a_link_is_not_followed(model: Path, tmp_path: Path) -> None:
    victim = llama(tmp_path / "victim")
    before = snapshot(victim)
    for name in ("partial", "replaced"):
        (tmp_path / f".out.gqa-{name}").symlink_to(victim)
    (tmp_path / ".out.gqa-lock").symlink_to(victim / "config.json")
    for name in ("lock", "partial", "replaced"):
        refused = run(*MERGED, "-o", tmp_path / "out", model)
        check_refused(refused, f".out.gqa-{name} was not left by a run of gqa", "move it away")
        assert snapshot(victim) == before
        (tmp_path / f".out.gqa-{name}").unlink()
    assert run(*MERGED, "-o", tmp_path / "out", model).code == 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("name", ["partial", "replaced", "work"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_hidden_directory_of_somebody_else_is_left_alone(
    model: Path, tmp_path: Path, name: str, overwrite: bool
) -> None:
    """Those of a run that was killed are removed by the next one (test_atomic.py); this one no run
    has made.
    """
    foreign = tmp_path / f".out.gqa-{name}"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    before = snapshot(tmp_path)
    words = [
        "--kv-heads",
        2,
        "--method",
        "aligned",
        "-o",
        tmp_path / "out",
        model,
        *(["--overwrite"] if overwrite else []),
    ]
    check_refused(run(*words), f"{foreign} was not left by a run of gqa; move it away")
    assert snapshot(tmp_path) == before


def test_a_lock_of_somebody_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.gqa-lock").write_text("mine")
    check_refused(
        run(*MERGED, "-o", tmp_path / "out", model), ".out.gqa-lock was not left by a run of gqa"
    )
    assert (tmp_path / ".out.gqa-lock").read_text() == "mine"


def test_output_with_dots(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is meant, not a name beside its last part; an empty one is used."""
    (tmp_path / "out").mkdir()
    (model / "assets").mkdir()
    (model / "assets" / "a.txt").write_text("a")
    for out in ("out", "out/assets/..", "out/../out/."):
        monkeypatch.chdir(tmp_path)
        assert run(*MERGED, "--overwrite", "-o", out, model).code == 0, out
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
        assert (tmp_path / "out" / "assets" / "a.txt").is_file()
    monkeypatch.chdir(tmp_path / "out")
    assert run("--kv-heads", 1, "--method", "mean", "--overwrite", "-o", ".", model).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
    assert 'from_pretrained("out")' in (tmp_path / "out" / "README.md").read_text()


def test_output_made_meanwhile_is_not_replaced(model: Path, tmp_path: Path) -> None:
    """Somebody else made OUT after it was looked at: before the lock is taken,
    and before the end.
    """
    out = tmp_path / "out"
    waiting = OutputDirectory(out, model)
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(RefusedError, match="exists; choose another"), waiting:
        pass
    assert leftovers(tmp_path) == []
    (out / "precious.txt").unlink()
    with OutputDirectory(out, model) as output:
        (output.work / "config.json").write_text("{}")
        (out / "precious.txt").write_text("mine")
        with pytest.raises(OutputError, match="exists; choose another"):
            output.commit("gqa_record.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"]
    assert (out / "precious.txt").read_text() == "mine"


def test_one_real_process(model: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"no\xffutf\n8")
    command = [
        Path(sys.executable).with_name("gqa-convert"),
        *map(str, MERGED),
        "-o",
        tmp_path / name,
        model,
    ]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (tmp_path / name / "config.json").is_file()


# -------------------------------------------------------------------------- the record and the card


def convert_quietly(*words: object) -> dict[str, Tensor]:
    done = checkpoints.run(*words, "-q", "--overwrite")
    assert done.code == 0, done.err
    return all_tensors(Path(str(words[words.index("-o") + 1])))


# The source, arguments of the conversion, and what loads the result, with its own code or not.
CARDS: dict[str, tuple[str, str, str, bool]] = {
    "same class": ("llama", "-g 2 --method mean", "AutoModelForCausalLM", False),
    "no heads merged": ("llama", "-g 4 --dtype float32", "AutoModelForCausalLM", False),
    "expanded": ("grouped", "-g 4", "AutoModelForCausalLM", False),
    "measured": (
        "llama",
        "-g 2 --refine-steps 2 --tokens 512 --context 64",
        "AutoModelForCausalLM",
        False,
    ),
    "by layer": ("llama", "-g 1,2 --method mean", "AutoModelForCausalLM", True),
    "another class": ("gpt_neox", "-g 2 --method mean", "AutoModelForCausalLM", False),
    "encoder-decoder": ("t5", "-g 2 --method mean", "AutoModelForSeq2SeqLM", True),
    "without a head": ("headless", "-g 2 --method mean", "LlamaModel", False),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    tiny_checkpoint(directory / "llama", kv_heads=4)
    tiny_checkpoint(directory / "grouped", kv_heads=2)
    for name, tiny in (
        ("t5", THEIRS["t5"]),
        ("gpt_neox", CASES["gpt_neox"].tiny),
        ("headless", TINY["llama"]),
    ):
        write_checkpoint(build(tiny, 4), directory / name)
    checkpoints.edit_json(
        directory / "headless/config.json",
        lambda config: config.update(architectures=["LlamaModel"]),
    )
    return directory


def check_card(out: Path, loader: str, needs_code: bool, tables: int) -> None:
    """Rendered, its tables are tables, and the first code loads the model."""
    html = MarkdownIt().enable("table").render(ModelCard.load(out / "README.md").text)
    assert html.count("<table>") == tables, html
    assert "| |" not in html, html
    assert "<p>|" not in html, html
    tokens = MarkdownIt().parse(ModelCard.load(out / "README.md").text)
    code = next(token for token in tokens if token.type == "fence")
    assert code.info == "python"
    assert ("trust_remote_code=True" in code.content) == needs_code
    names = dict[str, Any]()
    # What the card says is what is tested: its readers copy this code
    exec(code.content, names)
    assert names["model"].config.name_or_path == out.name
    assert loader in names
    assert ("tokenizer" in names) == (out / "tokenizer.json").exists()
    assert "Options: <code>" in html


@pytest.mark.parametrize("kind", CARDS)
def test_a_card_is_rendered_and_loads_the_model(
    kind: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, words, loader, needs_code = CARDS[kind]
    monkeypatch.chdir(tmp_path)
    done = checkpoints.run(sources / name, *words.split(), "-o", "out", "-q")
    assert done.code == 0, done.err
    check_card(Path("out"), loader, needs_code, tables=1)
    text = Path("out/README.md").read_text()
    rows = {
        name: pair
        for name, *pair in (
            line.strip("| ").split(" | ") for line in text.splitlines() if "| " in line
        )
    }
    assert all(before == after for before, after in [*rows.values()][2:]) == (
        kind == "no heads merged"
    )
    if name == "llama":
        base = [
            rows[key][0]
            for key in ("key/value heads", "KV cache per token", "KV cache at 64 tokens")
        ]
        assert base == ["4", "512 bytes", "32.0 KiB"]
        counts = [
            sum(t.numel() for t in all_tensors(path).values())
            for path in (sources / name, Path("out"))
        ]
        assert rows["parameters"] == [f"{count:,}" for count in counts]
    assert ("Quality was not measured" in text) == ("mean" in words)
    measured = r"perplexity x\d.* tokens of generated text in windows of \d+, recall "
    assert bool(re.search(measured, text)) == (kind == "measured")
    if kind == "by layer":
        data = write_corpus(Path("text.jsonl"), 4)
        training = (
            f"out --data {data} --teacher {sources / name} --steps 1 --batch-size 1 --context 16 "
            "-o trained -q"
        )
        with fresh_accelerator():
            assert checkpoints.run(*training.split(), program="gqa-uptrain").code == 0
        check_card(Path("trained"), loader, needs_code, tables=2)


@pytest.mark.parametrize(
    ("metadata", "tags"),
    [
        ("tags: mine", ["mine"]),
        ("tags: [[mine], a, {b: 1}]", ["a"]),
        (f"license: {'[' * 400}{']' * 400}", None),
    ],
)
def test_metadata_of_a_card(
    source: Path, tmp_path: Path, metadata: str, tags: list[str] | None
) -> None:
    """Tags are words; metadata that cannot be written again are left out.

    Cards do not grow with every step.
    """
    shutil.copytree(source, tmp_path / "model")
    card = f"---\n{metadata}\n---\n# Mine\n"
    (tmp_path / "model/README.md").write_text(card)
    for name, groups, out in (("model", 2, "out"), ("out", 1, "again")):
        convert_quietly(tmp_path / name, "-g", groups, "--method", "mean", "-o", tmp_path / out)
        text = (tmp_path / out / "README.md").read_text()
        assert text.count(BASE_CARD) == 1
        assert text.endswith("\n\n### Mine\n")
        assert "license" not in text
        assert text.count("key/value heads |") == 1
    if tags is not None:
        ours = ["gqa-convert", "multi-query-attention", "gqa"]
        assert sorted(ModelCard(text).data.to_dict()["tags"]) == sorted([*tags, *ours])


def test_the_record_has_the_arguments_of_the_command(source: Path, tmp_path: Path) -> None:
    """Without the paths of this machine; a call from Python has none, and its card shows no
    command.
    """
    convert_quietly(source, "-g", 2, "--method", "mean", "-o", tmp_path / "out")
    record = json.loads((tmp_path / "out/gqa_conversion.json").read_text())
    assert record["argv"] == [
        "model",
        "-g",
        "2",
        "--method",
        "mean",
        "-o",
        "out",
        "-q",
        "--overwrite",
    ]
    assert (
        "\ngqa-convert model -g 2 --method mean -o out -q --overwrite\n"
        in (tmp_path / "out/README.md").read_text()
    )
    made = convert_checkpoint(source, 2, tmp_path / "ours", method="mean").out
    assert json.loads((made / "gqa_conversion.json").read_text())["argv"] == []
    assert "gqa-convert model" not in (made / "README.md").read_text()
