"""``python -m campaigns.mutate``: changes the source at random, and reports what no test has noticed.

For each mutant, the tests that reach its module run in a copy of the tree until one fails: the nearest in the graph of
imports and in names first, unit tests before others, short ones before long ones. Results are lines of JSON in
``--results``; the same command continues them. A mutant whose tests were not done in ``--seconds`` is undecided, and is
tried again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from campaigns.imports import ROOT, Imports, is_test, read_imports
from campaigns.mutate.mutants import Mutant, draw_mutants
from campaigns.mutate.trial import CAUGHT, SURVIVED, UNDECIDED, Outcome, Tree

#: The folders of ``make test``, and what is added to the distance of their tests from a module: slow tests come later.
_PENALTIES = {
    "unit": 0,
    "distributed": 2,
    "simulated": 2,
    "failure": 3,
    "golden": 3,
    "promises": 3,
    "hostile": 4,
    "docs": 6,
    "packaging": 6,
}


def main() -> int:
    """Try mutants, and print a summary. Return 1 if one survived."""
    options = _parse_options()
    sources = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for package in options.packages.split(",")
        for file in sorted((ROOT / "src/rankless" / package).rglob("*.py"))
    }
    mutants = draw_mutants(sources, options.mutants, options.seed)
    results = read_results(options.results)
    imports = read_imports()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="rankless-") as folder:
        tree = Tree.copy(ROOT, Path(folder))
        for mutant in mutants:
            if results.get(mutant.name, UNDECIDED) != UNDECIDED or time.monotonic() > end:
                continue
            outcome = tree.try_mutant(mutant, order_tests(mutant.path, imports, _read_durations()), options.seconds)
            results[mutant.name] = outcome.status
            _write_result(options.results, mutant, outcome)
        unreliable = _list_unreliable(tree, options.results) if options.check else []
    return _report([results.get(mutant.name, "not tried") for mutant in mutants], unreliable)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn (default: 0)")
    parser.add_argument("--mutants", type=int, default=60, help="how many (default: 60)")
    parser.add_argument("--packages", default="engine,save,state,run,tier", help="of rankless (default: all of these)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after these")
    parser.add_argument("--seconds", type=float, default=3600, help="for the tests of one mutant (default: 3600)")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"), help="(default: mutants.jsonl)")
    parser.add_argument("--check", action="store_true", help="run the tests that caught mutants without a mutant")
    return parser.parse_args()


def order_tests(path: str, imports: Imports, durations: Mapping[str, float]) -> list[str]:
    """Return the files of tests that reach the module at ``path``, those first that probably catch its mutants."""
    target = next(module for module, file in imports.files.items() if file == ROOT / path)
    keys: dict[str, tuple[int, float, str]] = {}
    for module, distance in imports.distances([target]).items():
        folder = module.split(".")[1] if is_test(module) else ""
        if folder in _PENALTIES:
            file = str(imports.files[module].relative_to(ROOT))
            shared = len(_list_words(file) & _list_words(path))
            keys[file] = (distance + _PENALTIES[folder] - 2 * shared, durations.get(file, 0.0), file)
    return sorted(keys, key=lambda file: keys[file])


def _list_words(path: str) -> set[str]:
    """Return the words of a path, singular: ``tests/unit/tier/test_parts.py`` probably tests ``tier/part.py``."""
    words = set(re.findall("[a-z]+", path)) - {"src", "rankless", "tests", "test", "unit", "py"}
    return {word.removesuffix("s") for word in words}


def _read_durations() -> dict[str, float]:
    """Return the seconds of each file of tests, which ``make durations`` has measured."""
    file = ROOT / "tests/durations.json"
    durations: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return durations


def read_results(file: Path) -> dict[str, str]:
    """Return the last status of each mutant in a file of results."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {result["name"]: result["status"] for result in map(json.loads, lines)}


def _write_result(file: Path, mutant: Mutant, outcome: Outcome) -> None:
    print(f"{outcome.status}: {mutant.name}{f', by {outcome.test}' if outcome.test else ''}", flush=True)
    with file.open("a", encoding="utf-8") as results:
        results.write(json.dumps({"name": mutant.name} | asdict(outcome)) + "\n")


def _list_unreliable(tree: Tree, results: Path) -> list[str]:
    """Return the tests that have caught a mutant, but fail without one too."""
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    tests = sorted({line["test"] for line in lines if line["status"] == CAUGHT and line["test"].startswith("tests/")})
    return [test for test in tests if tree.run([test], 600).status != SURVIVED]


def _report(statuses: Sequence[str], unreliable: Sequence[str]) -> int:
    print(", ".join(f"{count} {status}" for status, count in Counter(statuses).most_common()))
    for test in unreliable:
        print(f"fails without a mutant too: {test}")
    return int(SURVIVED in statuses or bool(unreliable))


if __name__ == "__main__":
    sys.exit(main())
