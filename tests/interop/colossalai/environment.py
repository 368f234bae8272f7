"""An environment for the real package, whose version pins differ; created once, in ``.venv-colossalai``.

The package requires older versions of torch, but runs on this one. ``--no-deps`` omits unused requirements.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / ".venv-colossalai"
PYTHON = FOLDER / "bin/python"

_NEEDED = (
    *("torch==2.13.0", "numpy", "transformers==4.51.3", "peft==0.13.2", "accelerate==1.6.0"),
    *("safetensors", "einops", "psutil", "bitsandbytes"),
)
_ITSELF = ("--no-deps", "galore_torch==1.0", "colossalai==0.5.0")

#: Seconds that a download may take.
_PATIENCE = 1800


def ready() -> str | None:
    """Make the environment if it is not there. Returns why it cannot be used, or ``None``."""
    done = FOLDER / "installed"
    if done.exists():
        return None
    try:
        _run(sys.executable, "-m", "venv", str(FOLDER))
        _run(str(PYTHON), "-m", "pip", "install", "--quiet", *_NEEDED)
        _run(str(PYTHON), "-m", "pip", "install", "--quiet", *_ITSELF)
        _run(str(PYTHON), "-W", "ignore", "-c", "import colossalai.booster.plugin")
    except (OSError, subprocess.SubprocessError) as error:
        return f"colossalai==0.5.0 could not be installed into {FOLDER}: {error}"
    done.touch()
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=_PATIENCE, capture_output=True)


def peer(work: str, folder: Path, ranks: int) -> None:
    """Let the real package save or load everything in a folder, by one process alone or by several with DDP."""
    script = [str(Path(__file__).parent / "peer.py"), work, str(folder)]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env.pop("PYTHONPATH", None)
    completed = subprocess.run(
        [str(PYTHON), *launch, *script], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    if completed.returncode:
        raise AssertionError(
            f"the real package failed to {work}:\n{completed.stdout[-2000:]}\n{completed.stderr[-6000:]}"
        )
