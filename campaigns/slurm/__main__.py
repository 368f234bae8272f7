"""Run the guide's scripts in a real Slurm: scenes, and random histories.

``python -m campaigns.slurm setup`` unpacks the packages; ``scenes`` and ``histories`` run. It needs root.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from campaigns.common.namespaces import NEW_NAME, run_in_namespaces, unshare
from campaigns.common.programs import run
from campaigns.slurm.cluster import Cluster
from campaigns.slurm.histories import play_histories
from campaigns.slurm.jobs import Training, expected_digest
from campaigns.slurm.packages import DEFAULT_FOLDER, download_packages, lay_over, missing_parts
from campaigns.slurm.scenes import SCENES, SCRIPTS, wait_for_idle_nodes


def main() -> int:
    """Run a command. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.slurm", description=__doc__)
    parser.add_argument("command", choices=("setup", "scenes", "histories"))
    parser.add_argument("names", nargs="*", help="only these scenes")
    parser.add_argument("--packages", type=Path, default=DEFAULT_FOLDER, help="where setup unpacks the packages")
    parser.add_argument("--events", type=int, default=100, help="how many random events")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "setup":
        download_packages(arguments.packages)
        return 0
    if reasons := missing_parts(arguments.packages):
        print("skipped:", *reasons, sep="\n- ")
        return 0
    status: int = run_in_namespaces(lambda: _play(arguments))
    return status


def _play(arguments: argparse.Namespace) -> int:
    unshare(NEW_NAME)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    scratch = Path(tempfile.mkdtemp(prefix="rankless-slurm-"))
    over = scratch / "over"
    over.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", str(over))
    lay_over(arguments.packages, over)
    cluster = Cluster(scratch)
    cluster.start()
    if arguments.command == "histories":
        return play_histories(cluster, scratch, arguments.events, arguments.seed)
    return _play_scenes(cluster, scratch, arguments.names)


def _play_scenes(cluster: Cluster, scratch: Path, names: list[str]) -> int:
    scenes = {scene.play.__name__: scene for scene in SCENES}
    chosen = {name: scenes[name] for name in names or scenes}
    lengths = {scene.steps for scene in chosen.values()}
    expected = {steps: expected_digest(scratch / f"expected-{steps}", steps) for steps in lengths}
    right = wrong = 0
    print("| scene | script | jobs | attempts: from, to, end | lines of ours |\n|---|---|---|---|---:|", flush=True)
    for name, scene in chosen.items():
        for script in SCRIPTS:
            training = Training(cluster, scratch / f"{name}-{script}", scene.steps, has_tier=scene.has_tier)
            try:
                scene.play(training, script)
                states = ", ".join(training.end().values())
                lines = scene.judge(training, expected[scene.steps])
                attempts = "; ".join(f"{one.resumed}, {one.last}, {one.end}" for one in training.attempts())
                print(f"| {name} | {script} | {states} | {attempts} | {len(lines)} |", *lines, sep="\n    ", flush=True)
                right += 1
            except (AssertionError, RuntimeError) as error:
                wrong += 1
                print(f"| {name} | {script} | WRONG: {error} |", flush=True)
                run("scancel", "--user=root")
            wait_for_idle_nodes(cluster)
    print(f"{right} right, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
