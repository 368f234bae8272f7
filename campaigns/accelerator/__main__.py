"""``python -m campaigns.accelerator``: the tests on the accelerator of this machine, and the figures of its saves.

It needs a Python with PyTorch, and no network. Missing packages are installed from the wheels of
:mod:`campaigns.accelerator.pack`, if there are any, into a folder of the working tree; the environment of this Python
is not changed. Then it runs the tests with the simulated device and those on the accelerator, and prints the tables for
``docs/performance.md``. Each stage has a time limit, and all of them end within ``--seconds``.

The exit status is 0 if all stages passed, 1 if one failed, 3 if there is no accelerator and all else passed, and 4 if
the time did not suffice and all else passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from campaigns.accelerator.pack import ROOT, WHEELS
from campaigns.accelerator.stages import Outcome, Stage, run_stages
from campaigns.common.case_runner import format_table

#: The exit statuses besides 0 and 1.
NO_ACCELERATOR, OUT_OF_TIME = 3, 4

_SITE = ROOT / ".accelerator/site"

#: The seconds that the summary and the ends of processes may take.
_RESERVE_SECONDS = 10.0

#: The most seconds in which packages are installed, and in which PyTorch is imported.
_START_SECONDS = 120.0

#: About the seconds of the longest single measurement: the last one begins that long before the end.
_MEASUREMENT_SECONDS = 45.0

#: Prints what the tests and figures depend on. The exit status is 0 if there is an accelerator.
_LOOK = """
import os, platform, sys
try:
    import torch, rankless
except ImportError as error:
    sys.exit(f"{error}: {sys.executable} needs PyTorch, and the packages of `make accelerator-pack`")
device = torch.accelerator.current_accelerator(check_available=True)
name = "no accelerator"
if device is not None:
    name = getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)()
print(f"{name}; PyTorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
print(f"rankless {rankless.__version__} in {os.path.dirname(rankless.__file__)}", flush=True)
sys.exit(0 if device is not None else 3)
"""


def main() -> int:
    """Install, test, measure, and print what became of each stage. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.accelerator", description=__doc__)
    parser.add_argument("--seconds", type=float, default=460.0, help="time limit of all stages (default: 460)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the measured state (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (default: 3)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - _RESERVE_SECONDS

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((*install_packages(), str(ROOT)))}
    look = [sys.executable, "-c", _LOOK]
    found = subprocess.run(look, env=environment, cwd=ROOT, check=False, timeout=_START_SECONDS).returncode
    if found not in {0, NO_ACCELERATOR}:
        return 1
    has_accelerator = found == 0
    stages = list_stages(deadline, has_accelerator, options.gigabytes, options.rounds)
    outcomes = list(run_stages(stages, environment, has_accelerator, deadline))

    rows = [(outcome.name, outcome.result, f"{outcome.seconds:.0f}", outcome.reason) for outcome in outcomes]
    print("\n" + format_table(("stage", "result", "seconds", "reason"), rows), flush=True)
    return exit_status(outcomes, has_accelerator)


def install_packages() -> tuple[str, ...]:
    """Install the wheel of rankless and the packages that this Python lacks. Return the folders to import from.

    Without wheels, this working tree is used, with the packages that are there.
    """
    wheels = sorted(WHEELS.glob("*.whl"))
    if not wheels:
        return (str(ROOT / "src"),)
    shutil.rmtree(_SITE, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    needed = [str(wheel) for wheel in wheels if is_needed(wheel)]
    subprocess.run([*pip, "--target", str(_SITE), *needed], check=True, timeout=_START_SECONDS)
    return (str(_SITE),)


def is_needed(wheel: Path) -> bool:
    """Whether a wheel is that of rankless, or of a package that this Python does not have in any version."""
    name = wheel.name.partition("-")[0]
    if name == "rankless":
        return True
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def list_stages(deadline: float, has_accelerator: bool, gigabytes: float, rounds: int) -> Iterator[Stage]:
    """Yield the stages: the tests, and when these are done, the figures in the time that is left."""
    pytest = (sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider")
    yield Stage("tests on the accelerator", (*pytest, "tests/accelerator"), 120.0, needs_accelerator=True)
    workers = str(min(4, os.cpu_count() or 1))
    simulated = 150.0 if has_accelerator else deadline - time.monotonic()
    yield Stage("tests with the simulated device", (*pytest, "-n", workers, "tests/simulated"), simulated)
    left = deadline - time.monotonic()
    size = ("--gigabytes", str(gigabytes), "--rounds", str(rounds), "--seconds", str(left - _MEASUREMENT_SECONDS))
    figures = (sys.executable, "-m", "benchmarks.accelerator", *size)
    yield Stage("figures", figures, left, needs_accelerator=True)


def exit_status(outcomes: Sequence[Outcome], has_accelerator: bool) -> int:
    """Return the exit status: failures count most, then the accelerator that is not there, then lack of time."""
    if any(outcome.result == "failed" for outcome in outcomes):
        return 1
    if any(outcome.result == "out of time" for outcome in outcomes):
        return OUT_OF_TIME
    return 0 if has_accelerator else NO_ACCELERATOR


if __name__ == "__main__":
    sys.exit(main())
