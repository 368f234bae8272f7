"""``python -m benchmarks.compare REF``: times the main cases of a commit and of the working tree, in turn.

The commit is checked out into a temporary directory. Each version runs its own ``src`` in processes of its own, with
the benchmarks of the working tree; they use public names only, so the commit must have the same ones. In each round
every contender runs once, in random order: the commit, the working tree, and the commit again in other processes. The
two of the commit run the same code, so their ratio shows the noise (``benchmarks/paired_ratios.py``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import peers
from benchmarks.measure import Contender, Figure, SelfTimed, time_interleaved
from benchmarks.paired_ratios import LEAST_ROUNDS, Ratio, classify_ratio, compute_noise
from benchmarks.request_process import ROOT, RequestProcess
from benchmarks.setting import Setting
from benchmarks.start import STARTS, build_interpreter

#: The contenders, in this order.
REFERENCE, AGAIN, TREE = "reference", "reference again", "working tree"


@dataclass(frozen=True)
class Version:
    """The sources of one contender."""

    name: str
    source: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that import these sources."""
        # Without files of bytecode, each interpreter would compile all modules again.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "PYTHONPATH": str(self.source), "PYTHONWARNINGS": "ignore"}


class VersionJob:
    """A job of some ranks of one version that saves and loads on request."""

    def __init__(self, version: Version, workload: str, ranks: int, setting: Setting) -> None:
        store = Path(tempfile.mkdtemp(dir=setting.folder, prefix="store-")) / "store"
        module = [sys.executable, "-m", "benchmarks.version_rank", workload, str(setting.nbytes)]
        commands = [[*module, str(rank), str(ranks), str(store)] for rank in range(ranks)]
        self._ranks = [RequestProcess(command, version.environment) for command in commands]
        for rank in self._ranks:
            imported = Path(rank.wait_until_ready())
            if not imported.is_relative_to(version.source):
                raise RuntimeError(f"{version.name} imports {imported}, and not {version.source}")

    def request(self, work: str, path: Path) -> SelfTimed:
        """Have all ranks do the work. Return the seconds of the slowest."""
        for rank in self._ranks:
            rank.send(work, path)
        return SelfTimed(max(rank.receive().seconds for rank in self._ranks))

    def close(self) -> None:
        """End all ranks."""
        with ExitStack() as stack:
            for rank in self._ranks:
                stack.enter_context(rank)


#: The rounds of each contender, by the name of the case.
Rounds = Mapping[str, Mapping[str, Figure]]

#: Times one case of some versions.
Case = Callable[[list[Version], Setting], Rounds]


def time_tensors(workload: str, ranks: int, versions: list[Version], setting: Setting) -> Rounds:
    """Time durable saves, and cold loads of what they saved."""
    with start_jobs(versions, workload, ranks, setting) as jobs:
        title = {"large": f"{setting.gigabytes} in 8 tensors", "small": "20,000 x 4 KiB"}[workload]
        case = f"{title}, {ranks} rank{'s' * (ranks > 1)}"
        return {f"save, {case}": time_saves("save", jobs, setting), f"load, {case}": time_loads(jobs, setting)}


def time_stalls(versions: list[Version], setting: Setting) -> Rounds:
    """Time how long an asynchronous save blocks the caller."""
    with start_jobs(versions, "plain", 1, setting) as jobs:
        names = {staging: f"stall, {staging}, {setting.gigabytes}, 1 rank" for staging in ("eager", "overlapped")}
        return {name: time_saves(staging, jobs, setting) for staging, name in names.items()}


def time_resharding(versions: list[Version], setting: Setting) -> Rounds:
    """Time cold loads under tensor parallelism on 4 ranks of what 2 ranks have saved under FSDP2."""
    with start_jobs(versions, "FSDP2", 2, setting) as jobs:
        for name, job in jobs.items():
            job.request("save", setting.folder / name)
    with start_jobs(versions, "TP", 4, setting) as jobs:
        return {f"load, {setting.gigabytes}, 2 ranks FSDP2 to 4 ranks TP": time_loads(jobs, setting)}


def time_starts(versions: list[Version], setting: Setting) -> Rounds:
    """Time interpreters that import rankless, and the command's ``--help``."""
    figures: dict[str, Mapping[str, Figure]] = {}
    for case, arguments in STARTS.items():
        contenders = {
            version.name: build_interpreter(*arguments, environment=version.environment) for version in versions
        }
        figures[case] = time_interleaved(contenders, setting.rounds).build_table(case).figures
    return figures


@contextmanager
def start_jobs(versions: list[Version], workload: str, ranks: int, setting: Setting) -> Iterator[dict[str, VersionJob]]:
    """Start a job of each version, and end all of them."""
    with ExitStack() as stack:
        jobs = {version.name: VersionJob(version, workload, ranks, setting) for version in versions}
        for job in jobs.values():
            stack.callback(job.close)
        yield jobs


def time_saves(work: str, jobs: Mapping[str, VersionJob], setting: Setting) -> Mapping[str, Figure]:
    """Time saves to unused paths."""
    saves = {name: peers.make_fresh(setting.folder / name, partial(job.request, work)) for name, job in jobs.items()}
    return time_interleaved(saves, setting.rounds).build_table(work).figures


def time_loads(jobs: Mapping[str, VersionJob], setting: Setting) -> Mapping[str, Figure]:
    """Time loads of files that are not in the page cache."""
    loads: dict[str, Contender] = {}
    for name, job in jobs.items():
        path = setting.folder / name
        loads[name] = peers.make_cold(path, partial(job.request, "load", path))
    return time_interleaved(loads, setting.rounds).build_table("load").figures


CASES: dict[str, Case] = {
    "large": partial(time_tensors, "large", 1),
    "small-2-ranks": partial(time_tensors, "small", 2),
    "small-4-ranks": partial(time_tensors, "small", 4),
    "stall": time_stalls,
    "start": time_starts,
    "resharded": time_resharding,
}


def main() -> None:
    """Compare the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("reference", metavar="REF", help="the commit to compare the working tree with")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to run (default: all): {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of a large state (default: 1)")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="directory on the disk to measure")
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"an interval of 95 % needs {LEAST_ROUNDS} rounds")
    setting = Setting(options.folder.absolute(), options.rounds, int(options.gigabytes * 1e9))
    with check_out(options.reference) as checkout:
        sources = {REFERENCE: checkout / "src", AGAIN: checkout / "src", TREE: ROOT / "src"}
        versions = [Version(name, source) for name, source in sources.items()]
        print_head(options.reference)
        for name in options.cases or CASES:
            compare_case(CASES[name], versions, setting)


@contextmanager
def check_out(reference: str) -> Iterator[Path]:
    """Check out a commit of this repository into a temporary directory."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="rankless-compare-") as folder:
        checkout = Path(folder).resolve() / "checkout"
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), reference], check=True)
        try:
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def compare_case(case: Case, versions: list[Version], setting: Setting) -> None:
    """Time a case, and print its rows."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=setting.folder, ignore_cleanup_errors=True) as folder:
        for name, figures in case(versions, replace(setting, folder=Path(folder))).items():
            print(format_row(name, figures), flush=True)


def print_head(reference: str) -> None:
    """Print the head of the table."""
    print("The ratio is the median over the rounds, with its interval of about 95 %. The noise is how far the interval")
    print(
        "of the commit against itself reaches from 1. A difference is an interval that is wholly outside the noise.\n"
    )
    print(f"| case | {reference}, s | working tree, s | ratio | interval | noise | result |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)


def format_row(case: str, figures: Mapping[str, Figure]) -> str:
    """Return the line of a case."""
    reference, again, tree = (figures[name] for name in (REFERENCE, AGAIN, TREE))
    ratio = Ratio.from_rounds(tree.rounds, reference.rounds)
    between_equals = Ratio.from_rounds(again.rounds, reference.rounds)
    cells = (
        *(f"{figure.median:.3g} ± {figure.spread:.0%}" for figure in (reference, tree)),
        *(f"{ratio.median:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}", f"{compute_noise(between_equals):.0%}"),
        classify_ratio(ratio, between_equals),
    )
    return f"| {case} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
