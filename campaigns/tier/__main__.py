"""``python -m campaigns.tier demo``: a training goes on while hosts fail. Needs root."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from campaigns.hosts.namespaces import run_in_namespaces
from campaigns.tier import demo
from campaigns.tier.disk import mounted_disk

COMMANDS = {"demo": demo.run_demo}


def main() -> int:
    """Run a command in namespaces of its own. Return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.tier", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's image is (16 GB, sparse)")
    arguments = parser.parse_args()

    def run() -> int:
        with tempfile.TemporaryDirectory(prefix=".tier-", dir=arguments.folder) as folder:
            with mounted_disk(Path(folder)) as disk:
                COMMANDS[arguments.command](disk.path)
        return 0

    return run_in_namespaces(run)


if __name__ == "__main__":
    sys.exit(main())
