"""Install the built wheel and sdist into fresh environments and use what they install.

`make build` comes first.

    python tests/installed.py dist

Only the standard library: it runs before anything is installed. Dependencies are taken from the
environment that built the wheel, so that this tests the packages' own contents and not the network.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "tests" / "scripts" / "check_installed.py"


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def check(artifact: Path, dependencies: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        environment = Path(scratch) / "venv"
        venv.create(environment, with_pip=True)
        binaries = environment / ("Scripts" if sys.platform == "win32" else "bin")
        run(
            binaries / "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "setuptools>=77",
            cwd=Path(scratch),
        )
        run(
            binaries / "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            artifact,
            cwd=Path(scratch),
        )
        site = next((environment / "lib").glob("python*/site-packages"))
        (site / "dependencies.pth").write_text(f"{dependencies}\n")
        run(binaries / "python", CHECK, cwd=Path(scratch))
        assert "--kv-heads" in run(binaries / "gqa-convert", "--help", cwd=Path(scratch))
        out = Path(scratch) / "out"
        model = ROOT / "examples" / "stdlib-mha"
        run(
            binaries / "gqa-convert",
            "-g",
            "2",
            "--method",
            "mean",
            model,
            "-o",
            out,
            cwd=Path(scratch),
        )
        assert (out / "model.safetensors").is_file()
        print(f"ok: {artifact.name}")


def main() -> None:
    dist = Path(sys.argv[1]).resolve()
    dependencies = next((ROOT / ".venv" / "lib").glob("python*/site-packages"))
    artifacts = [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]
    if len(artifacts) != 2:
        raise SystemExit(
            f"{dist} should hold one wheel and one sdist, not {[a.name for a in artifacts]}"
        )
    for artifact in artifacts:
        check(artifact, dependencies)


if __name__ == "__main__":
    main()
