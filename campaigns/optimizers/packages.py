"""Tries the optimizers of torch and of packages, by name: trained, saved, restored by other processes, and stepped."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from campaigns.optimizers.catalog import PACKAGES, installed_version, is_installed, list_recipes
from campaigns.optimizers.round_trip import LAYOUTS, try_optimizers
from campaigns.optimizers.table import add_results, read_results, write_results
from campaigns.optimizers.verdict import SILENT, WRONG, Verdict
from tests.helpers.pool import Ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--package", action="append", choices=PACKAGES, help="(default: all that are installed)")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="(default: all)")
    parser.add_argument("--name", action="append", help="an optimizer, as the table has it (default: all)")
    parser.add_argument(
        "--write", action="store_true", help="write the table in docs/optimizers-and-families.md; not with --name"
    )


def run(options: argparse.Namespace) -> int:
    """Try the optimizers, and print the verdicts. Return 1 if one is wrong, or silently so."""
    if options.write and options.name:
        raise SystemExit("--write needs all names: leave out --name")
    results, are_bad = read_results(), False
    for package, layout, verdicts in _try_packages(options):
        for name, verdict in verdicts.items():
            print(f"{package}, {layout}: {name}: {verdict.kind}{': ' * bool(verdict.text)}{verdict.text}", flush=True)
            are_bad |= verdict.kind in {WRONG, SILENT}
        add_results(results, package, installed_version(package), layout, verdicts)
    if options.write:
        write_results(results)
    return int(are_bad)


def _try_packages(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Verdict]]]:
    ranks = Ranks()
    for package in options.package or filter(is_installed, PACKAGES):
        names = [name for name in list_recipes(package) if not options.name or name in options.name]
        for layout in options.layout or LAYOUTS:
            with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
                yield package, layout, try_optimizers(ranks, Path(folder), package, names, layout)
    ranks.close()
