"""Runs of pytest in forks of this process, which has imported what does not change: importing torch takes seconds.

This process must not import what a mutant may change, so that each fork imports it anew, from the tree of the mutant.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from campaigns.imports import PACKAGES, ROOT

#: What most tests import.
_UNCHANGED = ("torch.distributed.fsdp", "torch.distributed.checkpoint", "numpy", "hypothesis", "pytest")


def run_pytest(root: Path, arguments: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run pytest in the tree at ``root``, and return its exit code, or ``None`` if it took longer than ``seconds``.

    What it writes is in ``log``. The ranks that it has started are killed at the end.
    """
    for name in _UNCHANGED:
        import_module(name)
    gc.freeze()  # a collection in a fork would copy the memory of all these modules
    process = mp.get_context("fork").Process(target=_run_in_tree, args=(root, arguments, log))
    process.start()
    try:
        process.join(seconds)
        return process.exitcode
    finally:
        _kill_group(process)


def _run_in_tree(root: Path, arguments: Sequence[str], log: Path) -> None:
    os.setsid()
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(root)
    paths = [str(root / "src"), str(root)]
    others = {str(ROOT / "src"), str(ROOT), ""}
    sys.path[:] = [*paths, *(path for path in sys.path if path not in others)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")  # ranks that tests start would import this campaign
    sys.exit(int(sys.modules["pytest"].main([*arguments])))


def _kill_group(process: BaseProcess) -> None:
    """End pytest with the ranks that it has started."""
    process.kill()
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
