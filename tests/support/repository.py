"""Where the parts of this repository are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]

# What tests run in processes of their own, by path
SCRIPTS = ROOT / "tests" / "scripts"

# Each may import those before it.
PACKAGES = (
    "core",
    "checkpoint",
    "models",
    "corpus",
    "convert",
    "uptrain",
    "eval",
    "study",
    "package",
)
