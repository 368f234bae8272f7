"""``make dist``: builds an sdist and a wheel, checks their metadata, and tries each in an empty environment.

The environments have what pip fetches for the package and nothing else: no torch, unless ``--torch`` says that saves
are tried, too. Needs the packages of requirements-dist.txt, and a package index.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Without torch: the version, the commands, and the error of a save. It is run outside the repository.
READ = """
import subprocess, sys, rankless
print("rankless", rankless.__version__)
assert not rankless.__version__.startswith("0.0"), rankless.__version__
checkpoint = rankless.open(sys.argv[1])
assert all(checkpoint.array(name).shape == checkpoint.info(name).shape for name in checkpoint)
try:
    rankless.save_checkpoint
except ImportError as error:
    assert "needs PyTorch" in str(error), error
"""

#: With torch: what is saved is what is loaded.
SAVE = """
import tempfile, torch, rankless
run, model, other = tempfile.mkdtemp(), torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
rankless.save_checkpoint(run, "a", model=model)
rankless.load_checkpoint(run, model=other)
assert all(torch.equal(left, right) for left, right in zip(model.parameters(), other.parameters()))
"""


def main() -> None:
    """Build and check both distributions. They are in ``dist`` afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", action="store_true", help="install torch, too, and try a save")
    with_torch = parser.parse_args().torch
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", dist, ROOT)  # the wheel is built from the sdist
    files = sorted(dist.iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        try_distribution(file, with_torch=with_torch)
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, works", flush=True)


def try_distribution(file: Path, *, with_torch: bool) -> None:
    """Install a distribution into an empty environment, and use it there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python, command = folder / "venv/bin/python", folder / "venv/bin/rankless"
        _run(python, "-m", "pip", "install", "--quiet", f"{file}[torch]" if with_torch else file, cwd=folder)
        checkpoint = ROOT / "tests/golden/v1/training"
        _run(command, "--version", cwd=folder)
        for verb in ("ls", "show", "verify", "stats"):
            _run(command, verb, checkpoint, cwd=folder, quiet=True)
        _run(python, "-c", READ, checkpoint, cwd=folder)
        if with_torch:
            _run(python, "-c", SAVE, cwd=folder)


def _run(*command: str | Path, cwd: Path = ROOT, quiet: bool = False) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    main()
