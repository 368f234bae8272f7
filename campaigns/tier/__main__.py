"""``python -m campaigns.tier COMMAND``: a training goes on while hosts fail (``demo``), or measurements. Needs root."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from campaigns.common.namespaces import run_in_namespaces
from campaigns.tier import demo, figures
from campaigns.tier.disk import mounted_disk


def main() -> int:
    """Run a command in namespaces of its own. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.tier", description=__doc__)
    parser.add_argument("command", choices=("demo", "figures"))
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"of {', '.join(figures.FIGURES)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's image is")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state over four ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    def run() -> int:
        scratch = tempfile.TemporaryDirectory(prefix="tier-", dir=options.folder)
        with scratch as folder, mounted_disk(Path(folder)) as disk:
            if options.command == "demo":
                demo.run_demo(disk.path)
            else:
                figures.measure(disk, int(options.gigabytes * 1e9), options.rounds, options.names)
        return 0

    return run_in_namespaces(run)


if __name__ == "__main__":
    sys.exit(main())
