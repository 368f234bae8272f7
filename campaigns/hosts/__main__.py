"""``python -m campaigns.hosts COMMAND``: boots several kernels, asks what their file systems do, and ends them.

``setup`` downloads the packages, and ``check`` says whether the test bed can run here. The other commands are scenes:
each boots the hosts, prints a table row an answer, and ends the hosts. The exit status is 1 if an answer is "WRONG".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from campaigns.common.namespaces import run_in_namespaces
from campaigns.hosts.packages import DEFAULT_FOLDER, download_packages, missing_parts
from campaigns.hosts.scenes import faults, leftovers, locks, names, pages
from campaigns.hosts.testbed import KINDS, Testbed, running_testbed
from campaigns.run_histories.modules import MODULES


class Scene(NamedTuple):
    """A scene: its function, the clients that it needs, and the modules that they import once.

    The server imports the same modules, if no others are given.
    """

    run: Callable[[Testbed, list[str], int, Callable[[str], None]], None]
    clients: int
    modules: tuple[str, ...]
    server_modules: tuple[str, ...] | None = None


def _run_of(scene: str) -> Callable[[Testbed, list[str], int, Callable[[str], None]], None]:
    """Return the function of a scene whose module imports torch: it is imported when the scene begins."""

    def run(testbed: Testbed, kinds: list[str], times: int, report: Callable[[str], None]) -> None:
        import_module(f"campaigns.hosts.scenes.{scene}").run(testbed, kinds, times, report)

    return run


#: The modules that the ranks of a job import.
_OF_JOBS = ("campaigns.hosts.scenes.saves", "rankless.run_directory", "rankless.view")

SCENES = {
    "pages": Scene(pages.run, 3, (pages.__name__,)),
    "locks": Scene(lambda testbed, kinds, _, report: locks.run(testbed, kinds, report), 2, (locks.__name__,)),
    "leftovers": Scene(
        lambda testbed, kinds, _, report: leftovers.run(testbed, kinds, report), 2, (leftovers.__name__,)
    ),
    "names": Scene(lambda testbed, kinds, _, report: names.run(testbed, kinds, report), 2, (names.__name__,)),
    "faults": Scene(lambda testbed, kinds, _, report: faults.run(testbed, kinds, report), 2, (faults.__name__,)),
    "saves": Scene(_run_of("saves"), 3, _OF_JOBS),
    "folders": Scene(_run_of("folders"), 3, (*_OF_JOBS, "campaigns.hosts.scenes.folders")),
    "jobs": Scene(_run_of("jobs"), 3, (*_OF_JOBS, "campaigns.hosts.scenes.jobs")),
    "failures": Scene(_run_of("failures"), 3, (*_OF_JOBS, "campaigns.hosts.scenes.failures")),
    "histories": Scene(
        _run_of("histories"),
        3,
        ("campaigns.hosts.scenes.histories", *MODULES),
        server_modules=("campaigns.run_histories.places",),
    ),
}


def main() -> int:
    """Run a command. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.hosts", description=__doc__)
    parser.add_argument("command", choices=("setup", "check", *SCENES))
    parser.add_argument("--packages", type=Path, default=DEFAULT_FOLDER, help="where setup unpacks the packages")
    parser.add_argument("--mounts", nargs="+", choices=KINDS, default=["nfs4.2", "nfs3"])
    parser.add_argument("--nfs-options", nargs="+", default=[], help="such as lookupcache=positive")
    parser.add_argument("--times", type=int, default=50, help="how many files, saves, histories, or seconds each")
    parser.add_argument("--seed", type=int, default=0, help="that of the first history")
    arguments = parser.parse_args()
    if arguments.command == "setup":
        download_packages(arguments.packages)
        return 0
    if reasons := missing_parts(arguments.packages):
        print("skipped:", *reasons, sep="\n- ")
        return int(arguments.command == "check")
    if arguments.command == "check":
        print("the test bed can run here")
        return 0
    scene = SCENES[arguments.command]
    return run_in_namespaces(lambda: _play(scene, arguments))


def _play(scene: Scene, arguments: argparse.Namespace) -> int:
    of_server = scene.modules if scene.server_modules is None else scene.server_modules
    with running_testbed(arguments.packages, scene.clients, scene.modules, of_server) as testbed:
        testbed.nfs_options, testbed.first_seed = arguments.nfs_options, arguments.seed
        testbed.mount(*arguments.mounts)
        rows: list[str] = []

        def report(line: str) -> None:
            rows.append(line)
            print(f"| {line} |", flush=True)

        scene.run(testbed, arguments.mounts, arguments.times, report)
    return int(any("WRONG" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
