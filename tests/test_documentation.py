"""README.md, docs/ and the notebooks: their commands and blocks of Python run, each page alone,
with little text and tiny models of the names that stand there. What is published: one version,
links that lead somewhere, workflows, extras of the image. `make lint docs` checks the Dockerfile
and the site.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from dataclasses import MISSING
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from support.checkpoints import run
from support.custom_code import THEIRS
from support.embedded import SOURCE
from support.evaluations import few_questions
from support.native_models import CASES
from support.pages import blocks, commands
from support.patches import train_on_few_tokens
from support.tiny_models import TINY
from support.training import fresh_accelerator, tiny_checkpoint, write_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer

import gqa
from gqa.convert.api import convert_checkpoint
from gqa.convert.head_maps import HeadMaps
from gqa.convert.merge.fit import FittedModule
from gqa.convert.methods.base import Method
from gqa.convert.methods.text_method import TextMethod
from gqa.convert.methods.weights_method import WeightsMethod
from gqa.core.devices import fast_dtype
from gqa.core.options import _types
from gqa.corpus.specs import BUILT_IN, BuiltIn
from gqa.eval import metrics

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "docs/index.md", "docs/quickstart.md")]
PAGES += sorted({*(ROOT / "docs").glob("*.md")} - {*PAGES})
COMMAND_LINE = ROOT / "docs/command-line.md"
OPTIONS = {
    "gqa-convert": gqa.ConvertOptions,
    "gqa-uptrain": gqa.UptrainOptions,
    "gqa-eval": gqa.EvaluateOptions,
    "gqa-ablate": gqa.AblateOptions,
}
# Family, query heads and KV heads of the stand-ins for models, and the columns of those for data.
LLAMA = ("llama", 8, 8)
MODELS = {
    "examples/stdlib-mha": LLAMA,
    "SRC": LLAMA,
    "OUT": ("llama", 8, 2),
    "Llama-2-7b-hf": ("llama", 32, 32),
    "meta-llama/Llama-2-7b-hf": ("llama", 32, 32),
    "Qwen2.5-Coder-0.5B-Instruct": ("llama", 14, 2),
    "Qwen2.5-Coder-1.5B-Instruct": ("llama", 12, 2),
    "Qwen2.5-7B": ("llama", 28, 4),
    "MERGED": ("llama", 32, 32),
    "stories15M": ("llama", 6, 6),
    "SmolLM2-135M-Instruct": ("llama", 9, 3),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", 9, 3),
    "Qwen/Qwen2.5-3B-Instruct": ("llama", 16, 2),
    "google-t5/t5-small": ("t5", 4, 4),
    "stdlib-t5": ("t5", 4, 4),
    "EleutherAI/pythia-1b": ("gpt_neox", 8, 8),
    "openai-community/gpt2": ("gpt2", 12, 12),
}
DATA = {
    "train.jsonl": ["text"],
    "heldout.jsonl": ["text"],
    "validation.jsonl": ["text"],
    "sft.jsonl": ["prompt", "completion"],
    "generated-0.jsonl": ["text"],
    "wikitext2-test.txt": [],
    "tinystories-test.jsonl": ["text"],
    "pairs.jsonl": ["article", "summary"],
    "stdlib-t5/heldout.jsonl": ["source", "target"],
    "stdlib-t5/train.jsonl": ["source", "target"],
}
# Numbers that take hours become small ones. What is true of a command stays: its options, its
# order, its names.
LIMITS = {
    "--tokens": "512",
    "--context": "128",
    "--batch-size": "2",
    "--steps": "2",
    "--calibration-tokens": "256",
    "--decode-contexts": "16",
    "--decode-steps": "2",
    "--methods": "mean",
    "--alphas": "0,0.3",
    "--alpha": "0.3",
    "--precision": str(fast_dtype("cpu")).removeprefix("torch."),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gqa-convert": {"tokens": 512, "context": 64, "refine_steps": 2},
    "gqa-uptrain": {"context": 64, "batch_size": 2, "validation_tokens": 128},
    "gqa-eval": {"tokens": 400, "context": 128, "decode_contexts": 16, "decode_steps": 2},
    "gqa-ablate": {
        "methods": "mean",
        "kv_heads": 1,
        "alphas": 0.3,
        "context": 64,
        "batch_size": 2,
        "calibration_tokens": 256,
        "calibration_context": 64,
        "refine_steps": 2,
        "skip": ("kl", "recall"),
    },
}
# Programs that are not ours, and why they are not run here.
OTHERS = {
    "python3": "makes an environment",
    ".": "enters it",
    "pip": "installs",
    "hf": "needs the hub",
    "docker": "needs a daemon",
    "sudo": "changes the system",
    "uvx": "needs a registry",
    "pipx": "needs a registry",
    "uv": "needs a registry",
    "unzip": "unpacks",
    "git": "lists files",
    "grep": "selects files",
    "xargs": "reads files",
    "wc": "counts",
    "npm": "downloads",
    "tar": "unpacks",
    "eval": "completion",
    "source": "completion",
    "cp": "copies",
    "vllm": "make test-serving runs it",
    "ct2-transformers-converter": "make test-serving runs it",
    "cmake": "builds another project",
    "llama-server": "llama.cpp is not on PyPI",
    "llama-quantize": "llama.cpp is not on PyPI",
    "lm_eval": "tests/test_scoring.py runs it",
    "sh": "tests/test_guide.py runs it",
    "python": "another project's script",
}
PYTHON_ELSEWHERE = {
    "trl": "is not installed",
    "BitsAndBytesConfig": "needs a GPU's library",
    "yield": "is part of a function",
    "vllm": "is not installed",
    "llmcompressor": "is not installed",
    "PeftModel": "needs a trained adapter",
    "dequantize": "needs a quantized model",
    "general_model": "needs a published model",
}


def shortened(program: str, words: list[str]) -> list[str]:
    """The same command on little text, and with two of several numbers of heads."""
    limits = LIMITS | ({"--kv-heads": "1"} if program == "gqa-ablate" else {})
    small = [limits.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    small = [re.sub(r"^self((?::\w+)?):\w+$", r"self\1:512", word) for word in small]
    small = [re.sub(r"^(\d+,\d+)(,\d+)+$", r"\1", word) for word in small]
    writes = program in ("gqa-convert", "gqa-uptrain") and "--dry-run" not in words
    return [*small, *(["--overwrite"] if writes else [])]  # other pages may have used the name


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models by the names that the pages use, and texts."""
    root = tmp_path_factory.mktemp("stand-ins")
    for name, (family, heads, kv_heads) in MODELS.items():
        size = {
            "num_attention_heads": heads,
            "hidden_size": 8 * heads,
            "max_position_embeddings": 256,
        }
        tiny = TINY.get(family) or THEIRS.get(family) or CASES[family].tiny
        size["tie_word_embeddings"] = True
        tiny_checkpoint(
            root / name, tiny, kv_heads, **(size if family == "llama" else {"pad_token_id": 0})
        )
        if family == "t5":  # sentinels, for spans of plain text
            tokenizer = AutoTokenizer.from_pretrained(SOURCE)
            tokenizer.add_special_tokens(
                {"additional_special_tokens": [f"<extra_id_{n}>" for n in range(6)]}
            )
            tokenizer.save_pretrained(root / name)
    (root / "stdlib-mha").symlink_to("examples/stdlib-mha")
    # Conversions that other pages than their own train further
    quickstart = root / "examples/stdlib-mha-gqa2-refined"
    convert_checkpoint(root / "stdlib-mha", 2, quickstart, method="mean")
    guide = root / "Llama-2-7b-hf-gqa16-refined"
    convert_checkpoint(root / "Llama-2-7b-hf", 16, guide, method="mean")
    texts = [
        json.loads(line)["text"]
        for line in write_corpus(root / "corpus.jsonl").read_text().splitlines()
    ]
    for number, (name, fields) in enumerate(DATA.items()):
        rows = [
            {field: text[start:500] for start, field in enumerate(fields)}
            for text in texts[number::2]
        ]
        lines = map(json.dumps, rows) if fields else texts
        (root / name).write_text("\n".join([*lines, ""]))
    return root


@pytest.fixture
def small_world(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None
) -> Path:
    """The working directory, with stand-ins, small defaults, and a library of ten modules."""
    shutil.copytree(stand_ins, tmp_path, symlinks=True, dirs_exist_ok=True)
    for program, kind in OPTIONS.items():
        fields = kind.__dataclass_fields__
        for name, value in DEFAULTS[program].items():
            # Small defaults, so that commands and calls run as they are written, in seconds
            monkeypatch.setattr(
                fields[name], "default", _types(kind)[name][0].convert(value, None, None)
            )
        defaults = tuple(one.default for one in fields.values() if one.default is not MISSING)
        # The defaults of a call are those of the fields
        monkeypatch.setattr(kind.__init__, "__defaults__", defaults)
    train_on_few_tokens(monkeypatch)
    # Ten short modules instead of thousands
    for spec in ("stdlib:train", "stdlib:heldout"):
        short_texts = [text[:1200] for text in islice(BUILT_IN[spec].texts(), 10)]
        short = BUILT_IN[spec]._replace(texts=partial(list, short_texts))
        monkeypatch.setitem(BUILT_IN, spec, short)
    few_questions(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failure(words: list[str]) -> str:
    """Why a command of a page does not run, or is neither run nor listed; else nothing."""
    program, rest = words[0].rpartition("/")[2], words[1:]
    # The processes of a launcher, of which one runs here
    if "-m" in rest and program in ("accelerate", "torchrun"):
        config = rest[rest.index("--config_file") + 1] if "--config_file" in rest else "Makefile"
        program, *rest = rest[rest.index("-m") + 1 :]
        program = program.replace("gqa.", "gqa-")
        if rest == ["..."] or not (ROOT / config).exists():  # the words of the line before
            return "" if (ROOT / config).exists() else f"there is no {config}"
    if program in OPTIONS:
        with fresh_accelerator():
            done = run(*shortened(program, rest), program=program)
        return done.err if done.code else ""
    if program == "make":
        return "" if f"\n{rest[0]}:" in (ROOT / "Makefile").read_text() else "no such target"
    if program == "python" and (ROOT / rest[0]).is_file():
        missing = [
            word
            for word in rest
            if re.match(r"--\S+$", word) and f'"{word}"' not in (ROOT / rest[0]).read_text()
        ]
        return f"{rest[0]} has no {missing}" if missing else ""
    return "" if program in OTHERS or "=" in program else f"{program} is neither run nor listed"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(commands(page))], ids=lambda page: page.stem
)
def test_commands_of_a_page_run(page: Path, small_world: Path) -> None:
    """Each once, in the order of the page."""
    lines = {shlex.join(words): words for words in commands(page)}
    assert [(line, why) for line, words in lines.items() if (why := failure(words))] == []


def test_a_command_that_does_not_run_is_noticed() -> None:
    assert failure(["gqa-convert", "--metod", "mean"])
    assert failure(["unknown"]) == "unknown is neither run nor listed"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem
)
def test_python_of_the_pages_runs(
    page: Path, small_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one session a page, twice for the README and api.md.

    Blocks with libraries that are not here are left out.
    """
    monkeypatch.setattr(sys, "argv", ["", "gqa.convert.cli", "--version"])
    tokenizer = AutoTokenizer.from_pretrained("SRC")
    names: dict[str, Any] = {
        **vars(metrics),  # the example of a metric is for that file
        "HeadMaps": HeadMaps,
        "Method": Method,
        "WeightsMethod": WeightsMethod,
        "TextMethod": TextMethod,
        "FittedModule": FittedModule,
        "BuiltIn": BuiltIn,
        "partial": partial,
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }
    names["prompt"] = tokenizer("def f", return_tensors="pt", return_token_type_ids=False)
    with fresh_accelerator():
        for line, code in blocks(page, "python") * (1 + (page.stem in ("README", "api"))):
            if not any(word in code for word in PYTHON_ELSEWHERE):
                # The page is what is tested: its readers run this code
                exec(
                    compile(
                        "\n" * (line - 1) + code.replace("tokens=20_000", "tokens=2_000"),
                        page,
                        "exec",
                    ),
                    names,
                )
    sys.setprofile(None)
    threading.setprofile(None)


def command_line_page() -> str:
    """docs/command-line.md with what each command prints for --help, in 100 columns."""
    page = COMMAND_LINE.read_text(encoding="utf-8")
    for program in OPTIONS:
        before, opening, rest = page.partition(f"\n## {program}\n\n```text\n")
        assert opening, f"the page has no section {program} that begins with a block of text"
        _, closing, after = rest.partition("```\n")
        page = before + opening + help_of(program) + closing + after
    return page


def help_of(program: str) -> str:
    """What a command prints for --help, in a process without the small defaults of these tests."""
    module = {"gqa-ablate": "gqa.study"}.get(program, program.replace("gqa-", "gqa."))
    words = [sys.executable, "-m", module, "--help"]
    environment = os.environ | {"COLUMNS": "100"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_page_of_options_shows_what_help_prints() -> None:
    page = COMMAND_LINE.read_text(encoding="utf-8")
    assert page == command_line_page(), (
        "docs/command-line.md is not what --help prints; `python tests/test_documentation.py` "
        "writes it anew"
    )


def test_the_page_of_python_names_what_is_public() -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert [name for name in gqa.__all__ if name not in text and name != "__version__"] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.ipynb")), ids=lambda path: path.stem)
def test_the_notebook_runs(path: Path, small_world: Path) -> None:
    """From the first cell to the last; it is stored without outputs."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names = dict[str, Any]()
    for cell in cells:
        code = "".join(cell["source"]).replace("TOKENS = 4_000", "TOKENS = 1_000")
        # The notebook is what is tested: its readers run these cells
        exec(code.replace("tokens=8192, context=128", "tokens=1024, context=32"), names)
    assert len(names) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


# -------------------------------------------------------------------------------- what is published

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINKS = ("image", "link_open")


def test_one_version() -> None:
    version, cited = PROJECT["version"], yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    if tag := os.environ.get("RELEASE_TAG"):
        assert tag == f"v{version}"


def dead_links(page: str, directory: Path = ROOT) -> list[str]:
    """Pictures and links of a page in a directory that lead to no file, or to no heading of it."""
    parts = [
        part for token in MarkdownIt().enable("table").parse(page) for part in token.children or ()
    ]
    links = [
        str(part.attrs["src" if part.type == "image" else "href"])
        for part in parts
        if part.type in LINKS
    ]
    return [
        link
        for link in links
        if not link.startswith("https://") and not leads_somewhere(link, directory)
    ]


def leads_somewhere(link: str, directory: Path) -> bool:
    name, _, heading = link.partition("#")
    file = directory / (name or "README.md")
    if not heading or not file.is_file():
        return file.exists()
    titles = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
    return heading in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}


def test_no_page_has_a_gap() -> None:
    """A mark where a table or a figure is still to come."""
    gap = re.compile(r"@@|\bTODO\b|\bXXX\b")
    assert [page.name for page in PAGES if gap.search(page.read_text())] == []


def test_headings_begin_with_a_letter() -> None:
    """Else the scripts of the site's theme stop at their anchors, and tables have no lines."""
    headings = [line for page in PAGES for line in page.read_text().split("\n#") if line]
    assert headings
    assert [line[:40] for line in headings if re.match(r"#*\s*\d", line)] == []


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *ROOT.glob("examples/*.ipynb")):
        cells = (
            json.loads(page.read_text())["cells"]
            if page.suffix == ".ipynb"
            else [{"source": page.read_text()}]
        )
        assert [
            link for cell in cells for link in dead_links("".join(cell["source"]), page.parent)
        ] == []
    page_of_dead_links = (
        "[x](examples) [x](CONTRIBUTING.md#nothing) [x](docs/nothing.md) [x](#nothing) "
        "![x](front.svg)"
    )
    assert dead_links(page_of_dead_links) == [
        "CONTRIBUTING.md#nothing",
        "docs/nothing.md",
        "#nothing",
        "front.svg",
    ]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name
)
def test_workflows_run_what_is_there(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert all(job.get("needs", name) in jobs for name, job in jobs.items())
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert set(words[1:]) <= targets, command
        assert all(
            (ROOT / word).exists() for word in words if word.startswith(("tests/", ".ci/"))
        ), command


def test_the_image_has_extras_that_are_there() -> None:
    extras = re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Dockerfile").read_text())
    assert {name for group in extras for name in group.split(",")} <= PROJECT[
        "optional-dependencies"
    ].keys()


if __name__ == "__main__":
    COMMAND_LINE.write_text(command_line_page(), encoding="utf-8")
