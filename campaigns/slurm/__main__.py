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
from campaigns.slurm.scenes import SCENES, SCRIPTS, WITH_TIER, wait_for_idle_nodes

#: The steps of the training in a scene, and in one that takes longer: Slurm compares times every half minute.
STEPS, MORE_STEPS = 60, {"reach_the_time_limit": 600}


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
    return _play_scenes(cluster, scratch, arguments.names or list(SCENES))


def _play_scenes(cluster: Cluster, scratch: Path, names: list[str]) -> int:
    expected = {steps: expected_digest(scratch / f"expected-{steps}", steps) for steps in (STEPS, *MORE_STEPS.values())}
    failed = 0
    print("| scene | script | job | went on from step | lines of ours |\n|---|---|---|---|---:|", flush=True)
    for name in names:
        for script in SCRIPTS:
            steps = MORE_STEPS.get(name, STEPS)
            training = Training(cluster, scratch / f"{name}-{script}", steps, has_tier=name in WITH_TIER)
            try:
                state = SCENES[name](training, script)
                resumed, ours = training.judge(expected[steps]), training.lines_of_ours()
                print(f"| {name} | {script} | {state} | {resumed} | {len(ours)} |", *ours, sep="\n    ", flush=True)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                print(f"| {name} | {script} | WRONG: {error} |", flush=True)
                run("scancel", "--user=root")
            wait_for_idle_nodes(cluster)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
