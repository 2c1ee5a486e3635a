"""Every command that README.md and docs/ show. Its options exist and its values parse; and page by page, in order, what
needs nothing but a checkpoint and a text is run: on tiny models of the names that stand there, with little text."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from checkpoints import run
from evaluations import few_questions
from markdown_it import MarkdownIt
from training import fresh_accelerator, tiny_checkpoint, write_corpus

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = {
    "gqa-convert": "convert.cli", "gqa-uptrain": "uptrain.cli",
    "gqa-eval": "eval.cli", "gqa-ablate": "eval.study.cli",
}  # fmt: skip
# Query and KV heads of the stand-ins; what is not here (hub ids, other families) has its options read only.
MODELS = {
    "examples/stdlib-mha": (8, 8), "Llama-2-7b-hf": (32, 32), "some-gqa-model": (32, 8),
    "SmolLM2-135M-Instruct": (9, 3), "MODEL": (8, 8), "SRC": (32, 32),
}  # fmt: skip
TEXTS = ("corpus.jsonl", "heldout.jsonl", "wiki.txt", "wikitext2-test.txt")
# Numbers that take hours become small ones. What is true of the command stays: its options, its order, its names.
SMALL = [
    (r"^self(:plain)?(:\w+)?$", r"self\1:1024"),
    (r"^stdlib:\w+$", "corpus.jsonl"),
    (r"^(\d,\d)(,\d)+$", r"\1"),  # heads by layer, of which the stand-ins have two
]
LIMITS = {
    "--tokens": "512", "--calibration-tokens": "256", "--refine-steps": "2", "--steps": "2",
    "--eval-tokens": "200", "--heldout-fraction": "0.2", "--context": "128", "--alphas": "0,0.1",
    "--methods": "refined", "--batch-size": "2",
    "--cache-bits": "4", "--skip": "recall",
}  # fmt: skip
_TEXT = {"--tokens": "256", "--context": "64"}
# What is said besides, where all words of a key stand in the command.
ADDED = {
    "gqa-uptrain": {"--steps": "2", "--context": "64", "--batch-size": "2", "--heldout-tokens": "256"},
    "gqa-eval --data": {"--no-recall": "", "--tokens": "400"},
    "gqa-eval --decode": {"--decode-steps": "2"},
    "gqa-ablate": {
        "--calibration-tokens": "256", "--refine-steps": "2", "--groups": "2",
        "--methods": "refined", "--context": "64", "--batch-size": "2", "--skip": "recall",
    },
    "gqa-convert refined": {**_TEXT, "--refine-steps": "2"},
    "gqa-convert calibrated": _TEXT,
}  # fmt: skip
LENGTHS = {"--steps", "--tokens", "--alpha"}  # of a training: one of them


def fenced(page: Path) -> Iterator[str]:
    """The lines of a page's blocks that are commands, without comments, continued lines as one."""
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.info in ("", "sh", "bash"):
            yield from token.content.replace("\\\n", " ").splitlines()


def commands(page: Path) -> Iterator[tuple[str, list[str], bool]]:
    """Program, words, and whether it is started as it stands, not through a launcher of many processes."""
    for line in fenced(page):
        words = shlex.split(line, comments=True) if re.match(r"(\S*/)?(gqa-\w+|accelerate|torchrun) ", line) else []
        if not words or "..." in words:  # `...` stands for the words of the line before
            continue
        program, rest = words[0].rpartition("/")[2], words[1:]
        if program in MODULES:
            yield program, rest, True
        elif "-m" in rest:
            module, *rest = rest[rest.index("-m") + 1 :]
            yield module.replace("gqa.", "gqa-"), rest, False


SHOWN = [(page, *command) for page in PAGES for command in commands(page)]


@pytest.mark.parametrize(("program", "words"), [(program, words) for _, program, words, _ in SHOWN],
                         ids=[f"{page.stem}-{number}" for number, (page, *_) in enumerate(SHOWN)])  # fmt: skip
def test_options_exist(program: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith(".safetensors"):  # an option that takes a file wants it to be there
            Path(word).touch()
    command = import_module(f"gqa.{MODULES[program]}").command
    command.make_context(program, list(words))


def test_every_fence_of_commands_is_seen(tmp_path: Path) -> None:
    """And no other: what closes a block of Python opens none."""
    page = tmp_path / "page.md"
    python = "```python\nimport gqa\n```\n\ngqa-convert is a command.\n\n"
    fences = "```\ngqa-eval A \\\n  B  # told\n```\n\n", "- a list\n  ```sh\n  gqa-ablate R\n  ```\n"
    page.write_text(python.join(("", *fences)))
    assert list(commands(page)) == [("gqa-eval", ["A", "B"], True), ("gqa-ablate", ["R"], True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models and texts by the names that the pages use."""
    import transformers

    world = tmp_path_factory.mktemp("models")
    for name, (heads, kv_heads) in MODELS.items():
        size = {"num_attention_heads": heads, "hidden_size": 8 * heads, "max_position_embeddings": 128}
        tiny_checkpoint(world / name, kv_heads=kv_heads, tie_word_embeddings=True, **size)
    write_corpus(world / "corpus.jsonl")
    write_corpus(world / "heldout.jsonl", 3)
    rows = [{"article": f"{n} in words is " + "one " * (n % 7 + 1), "summary": f"number {n}"} for n in range(40)]
    (world / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny_checkpoint(world / "t5-small", "gqa_t5", 4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "t5-small")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra_id_{n}>" for n in range(6)]})
    tokenizer.save_pretrained(world / "t5-small")
    shutil.copytree(world / "t5-small", world / "stdlib-t5")
    renamed = [json.dumps({"source": row["article"], "target": row["summary"]}) + "\n" for row in rows]
    (world / "stdlib-t5" / "train.jsonl").write_text("".join(renamed))
    (world / "stdlib-t5" / "heldout.jsonl").write_text("".join(renamed).replace("in words", "spoken"))
    for name in TEXTS[2:]:
        (world / name).write_text((ROOT / "README.md").read_text()[:6000])
    for source, groups in (("SRC", 8), ("SRC", 1), ("MODEL", 8), ("MODEL", 2), ("t5-small", 2)):
        suffix = f"gqa{groups}" if groups > 1 else "mqa"
        done = run(world / source, "--groups", groups, "--method", "mean", "-o", world / f"{source}-{suffix}")
        assert done.code == 0, done
    return world


def made_small(program: str, words: list[str]) -> list[str]:
    """The same command on little text."""
    found: list[str] = []
    limits = LIMITS | ({"--groups": "2"} if program == "gqa-ablate" else {})
    for word in words:
        for pattern, short in SMALL:
            word = re.sub(pattern, short, word)
        found.append(limits.get(found[-1] if found else "", word))
    if program == "gqa-ablate" and "stdlib:train" in words and "--heldout" not in words:
        found += ["--heldout", "heldout.jsonl"]  # stdlib:train brings it along
    study_of_old = program == "gqa-ablate" and "--data" not in words
    planned = "--dry-run" in words
    told = planned or study_of_old
    for name, extras in ADDED.items():
        if not told and {program, *words}.issuperset(name.split()):
            left = LENGTHS if program == "gqa-uptrain" and LENGTHS & {*words} else set()
            left = left | ({"--heldout-tokens"} if {"--teacher", "targets"} <= {*words} else set())  # it has its own
            left = left | ({"--no-recall"} if "--recall" in words else set())
            found += [one for key, value in extras.items() if key not in {*words, *left} for one in (key, value) if one]
    return found


def runnable(words: list[str], here: Path) -> bool:
    """Whether what it reads is here: hub ids and other families' models are not."""
    names = [word for word in words if re.fullmatch(r"(\./|[\w-]+/)[\w.-]+", word)]
    return all((here / name).exists() for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_run_in_order(
    page: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    shutil.copytree(models, here)
    monkeypatch.chdir(here)
    few_questions(monkeypatch)
    monkeypatch.setattr("gqa.eval.study.report.no_pictures", lambda: "no pictures")  # drawn by test_study_report
    for program, words, whole in commands(page):
        small = made_small(program, words)
        if not whole or not runnable(small, here):
            continue
        with fresh_accelerator():
            done = run(*small, program=program)
        assert done.code == 0, (program, words, done.err)
