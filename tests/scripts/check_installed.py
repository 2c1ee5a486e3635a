"""Check the gqa that is installed in the environment of this Python: tests/installed.py runs it."""

from __future__ import annotations

import importlib.metadata
import importlib.resources

import gqa
import gqa.convert
import gqa.corpus
import gqa.eval
import gqa.uptrain
from gqa.convert.api import convert_checkpoint, plan_conversion
from gqa.corpus.general import general_texts


def check_files() -> None:
    """The packages come from site-packages, and with what is not Python."""
    assert "site-packages" in gqa.convert.__file__, gqa.convert.__file__
    for package in ("gqa", "gqa.convert", "gqa.corpus", "gqa.uptrain", "gqa.eval"):
        assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
    modeling = importlib.resources.files("gqa.models.modeling")
    files = {path.name for path in modeling.iterdir()}
    assert {"modeling_gqa.py", "modeling_gqa_by_layer.py"} <= files, files
    assert any("lighthouse" in text for text in general_texts()), "the files of corpus/kinds"


def check_names() -> None:
    """What is public, and what the package says of itself."""
    assert callable(gqa.convert_model)
    assert callable(convert_checkpoint)
    assert callable(plan_conversion)
    assert gqa.__version__ == importlib.metadata.version("gqa")
    assert importlib.metadata.metadata("gqa")["License-Expression"] == "Apache-2.0"


if __name__ == "__main__":
    check_files()
    check_names()
