"""The cases of the campaign: each copies a checkpoint, changes it, sometimes fixes its checksums, and reads it."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

from campaigns.fuzz import seeds
from campaigns.fuzz.dcp_metadata import edit_metadata
from campaigns.fuzz.mutations import mutate_file
from campaigns.fuzz.read_check import ReadChecker
from tests.helpers.sealed_checkpoints import reseal_checkpoint, reseal_published


class Violation(NamedTuple):
    """A case that was handled wrongly. Its kind, seed and number reproduce it."""

    kind: str
    case: str
    problem: str


class Fuzzer:
    """A generator of cases from intact checkpoints. The same seed and number give the same case."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self.seeds: Mapping[str, Path] = seeds.create_seeds(folder / "seeds")
        self.checker = ReadChecker()

    def run_case(self, kind: str, number: int) -> tuple[Path, Violation | None]:
        """Create a case and check it. Return its path."""
        chance = random.Random(f"{self._seed}/{kind}/{number}")
        path = self._copy_seed(kind)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        file = chance.choice(files)
        raw = file.read_bytes()
        by_class = file.name == ".metadata" and chance.random() < 0.6
        file.write_bytes(edit_metadata(raw, chance) if by_class else mutate_file(raw, file.name, chance))
        if kind == "native" and file.name != "manifest.json" and chance.random() < 0.7:
            reseal_checkpoint(path)
        if kind == "weights" and chance.random() < 0.7:
            reseal_published(file)
        problem = self.checker.find_problem(path)
        return path, Violation(kind, f"{self._seed}/{number} {file.name}", problem) if problem else None

    def _copy_seed(self, kind: str) -> Path:
        seed = self.seeds[kind]
        place = self._folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        copied = shutil.copytree if seed.is_dir() else shutil.copy
        return Path(copied(seed, place / seed.name))

    def run_cases(self, first: int, kinds: list[str] | None = None) -> Iterator[tuple[Path, Violation | None]]:
        """Yield cases of all kinds in turn, without end."""
        for number in count(first):
            for kind in kinds or list(self.seeds):
                yield self.run_case(kind, number)


def main() -> int:
    """Run for some minutes. Return 1 if a case was handled wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (default: 0)")
    parser.add_argument("--kind", action="append", help="only checkpoints of this kind; may be repeated")
    options = parser.parse_args()
    ends, violations, done = time.monotonic() + 60 * options.minutes, 0, 0
    with tempfile.TemporaryDirectory(prefix="rankless-fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder), options.seed)
        for path, violation in fuzzer.run_cases(options.first, options.kind):
            done += 1
            if violation is not None:
                violations += 1
                print(f"WRONG: {violation.kind} {violation.case}: {violation.problem}", flush=True)
                _keep_case(path, Path("fuzz_violations") / f"{violations}")
            if time.monotonic() > ends:
                break
    checker = fuzzer.checker
    print(f"{done} checkpoints: {checker.read} read, {checker.refused} refused, {violations} handled wrongly")
    return int(bool(violations))


def _keep_case(path: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(path.parent, place)
