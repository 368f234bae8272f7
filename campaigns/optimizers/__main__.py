"""``python -m campaigns.optimizers``: ``layouts`` tries each kind of state, ``packages`` each optimizer by name."""

from __future__ import annotations

import argparse
import sys

from campaigns.optimizers import layouts, packages


def main() -> int:
    """Run one of the two campaigns. Return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.optimizers", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, campaign in (("layouts", layouts), ("packages", packages)):
        command = commands.add_parser(name, help=str(campaign.__doc__).splitlines()[0], description=campaign.__doc__)
        campaign.add_arguments(command)
        command.set_defaults(run=campaign.run)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
