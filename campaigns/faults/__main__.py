"""``python -m campaigns.faults``: every call that a save or a load makes to the file system goes wrong once.

The calls are counted in a dry run; then the n-th one fails, for every n, in every way that such a call can: no space,
no right, an error of the disk (once, or from then on), fewer bytes than asked for; or the folder, the draft or a file
is removed just before it. Either all ranks raise the same typed error, which names a path in the run where it is the
disk's, or the save or load is right: a load gives the newest checkpoint, or the older one where a part of the newest
was removed. What was there before is as it was, bit for bit; nothing half made is visible, no file stays open, and the
next save works and leaves the folder tidy. Exits with 1 where anything else is seen.
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

#: Seconds that all faults of one setting may take.
PATIENCE = 1800.0


def tried_by_a_job(setting: Setting, scratch: Path, every: int = 1) -> Tally:
    """All faults of one setting."""
    with Job(setting.ranks, "agent", scratch, tried, scratch / str(abs(hash(setting))), setting, every) as job:
        if not job.wait(lambda: len(job.ends) == setting.ranks, PATIENCE):
            return Tally(violations=[f"{setting}: the ranks hang"])
        tally: Tally = job.ends[0].result or Tally(
            violations=[f"{end.error}: {end.message}" for end in job.ends.values()]
        )
    return Tally(tally.calls, tally.outcomes, [f"{setting}: {one}" for one in tally.violations])


def main() -> int:
    """Run it all, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.faults", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="where to save; a temporary folder when left out")
    parser.add_argument("--every", type=int, default=1, help="only one in so many faults")
    parser.add_argument("--only", default="", help="only the settings with this in their names")
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
    print(table.markdown(("save or load; the faulty rank", "calls", "faults", "what came of them"), rows))
    print(f"\n{sum(row[2] for row in rows)} faults, {time.monotonic() - started:.0f} s")
    return table.verdict([one for _, tally in found for one in tally.violations])


if __name__ == "__main__":
    sys.exit(main())
