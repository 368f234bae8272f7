"""``python -m campaigns.faults``: makes every file system call of a save or a load fail once.

It proves "Faults of the disk" of ``docs/failure-model.md``. A dry run counts the calls. Then call n fails, for every n,
in every way that such a call can fail: no space, no permission, an I/O error (once, or from then on), fewer bytes than
requested; or the run's directory, the staging directory or a file is removed just before it.

Either all ranks raise the same typed error, which names a path in the run if it is a storage error, or the save or load
is correct. A load may give the older checkpoint only if a part of the newest one was removed. Earlier checkpoints are
unchanged, bit for bit; nothing incomplete is visible; no file stays open; and the next save works and leaves no
leftovers. It exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from campaigns.faults.bench import Tally, tried
from campaigns.faults.cases import SETTINGS, Setting
from campaigns.kit import table
from campaigns.kit.job import Job

#: The time limit, in seconds, of all faults of one setting.
PATIENCE = 1800.0


def tried_by_a_job(setting: Setting, scratch: Path, every: int = 1) -> Tally:
    """Try all faults of one setting."""
    with Job(setting.ranks, "agent", scratch, tried, scratch / str(abs(hash(setting))), setting, every) as job:
        if not job.wait(lambda: len(job.ends) == setting.ranks, PATIENCE):
            return Tally(violations=[f"{setting}: the ranks hang"])
        tally: Tally = job.ends[0].result or Tally(
            violations=[f"{end.error}: {end.message}" for end in job.ends.values()]
        )
    return Tally(tally.calls, tally.outcomes, [f"{setting}: {one}" for one in tally.violations])


def main() -> int:
    """Run all settings, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.faults", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory to save in (default: a temporary one)")
    parser.add_argument("--every", type=int, default=1, help="try only every n-th fault (default: 1)")
    parser.add_argument("--only", default="", help="only settings whose names contain this text")
    options = parser.parse_args()
    chosen = [setting for setting in SETTINGS if options.only in str(setting)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        work = partial(tried_by_a_job, scratch=Path(folder), every=options.every)
        found = list(table.run(chosen, work, 2))
    rows = []
    for setting, tally in found:
        outcomes = ", ".join(f"{word} {count}" for word, count in tally.outcomes.most_common())
        rows.append((setting, tally.calls, tally.outcomes.total() + len(tally.violations), outcomes))
    print(table.markdown(("save or load; the faulty rank", "calls", "faults", "outcomes"), rows))
    print(f"\n{sum(row[2] for row in rows)} faults, {time.monotonic() - started:.0f} s")
    return table.verdict([one for _, tally in found for one in tally.violations])


if __name__ == "__main__":
    sys.exit(main())
