"""``python -m campaigns.accelerator.pack``: collect what ``make accelerator`` needs on a machine without a network.

It builds the wheel of rankless, and downloads wheels of the packages that the tests and benchmarks import, in the
versions of ``requirements-dev.txt``. PyTorch, NumPy and what they need are not among them: the other machine has them.
Copy the working tree and the folder ``.accelerator`` there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Where the wheels are, in the working tree.
WHEELS = ROOT / ".accelerator/wheels"

#: The packages, with all that they need but PyTorch, NumPy and what these need.
PACKAGES = frozenset(
    {"awscrt", "msgspec", "safetensors", "torch_checkpointing"}
    | {"rich", "markdown-it-py", "mdurl", "Pygments"}
    | {"typer", "annotated-doc", "shellingham", "pydantic", "pydantic_core", "annotated-types", "typing-inspection"}
    | {"pytest", "iniconfig", "packaging", "pluggy", "pytest-timeout", "pytest-xdist", "execnet"}
    | {"hypothesis", "sortedcontainers", "psutil"}
)

#: The versions of the C library for which wheels are taken. pip compares them exactly.
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35))

#: The most megabytes of the working tree and the wheels: what is copied to the other machine stays small.
MAX_MEGABYTES = 64


def main() -> int:
    """Collect the wheels. Return 1 if they and the files of the repository are too large to copy."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.accelerator.pack", description=__doc__)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=own, help=f"version of Python on the other machine (default: {own})")
    options = parser.parse_args()
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    build_wheel(WHEELS)
    download_wheels(WHEELS, options.python)
    wheels = sum(file.stat().st_size for file in WHEELS.iterdir())
    files = sum((ROOT / name).stat().st_size for name in list_files())
    print(f"{WHEELS}: {wheels / 1e6:.1f} MB; with the files of the repository {(wheels + files) / 1e6:.1f} MB")
    if wheels + files > MAX_MEGABYTES * 2**20:
        print(f"That is more than {MAX_MEGABYTES} MiB.", file=sys.stderr)
        return 1
    return 0


def build_wheel(folder: Path) -> None:
    """Build the wheel of rankless with the build system of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)


def download_wheels(folder: Path, python: str) -> None:
    """Download the packages for x86-64 Linux and a version of Python."""
    pins = [
        line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line.split("==")[0] in PACKAGES
    ]
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target, "--dest", str(folder), *pins]
    subprocess.run(command, check=True)


def list_files() -> list[str]:
    """Return the files of the repository that are copied: those that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
