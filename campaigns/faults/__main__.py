"""``python -m campaigns.faults``: makes every file system call of a save or a load fail once.

It proves "Faults of the disk" of ``docs/failure-model.md``. A dry run counts the calls. Then call n fails, for every n,
in every way that such a call can fail: no space, no permission, an I/O error (once, or from then on), fewer bytes than
requested; or the run's directory, the pending directory or a file is removed just before it.

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

from campaigns.common import case_runner
from campaigns.common.job import Job
from campaigns.faults.cases import FAULTY_CALLS, FaultyCall
from campaigns.faults.fault_trial import Tally, try_all_faults

#: The time limit, in seconds, of all faults of one save or load.
MAX_SECONDS = 1800.0


def try_faults_in_job(faulty_call: FaultyCall, scratch: Path, every: int = 1) -> Tally:
    """Try all faults of one save or load."""
    with Job(
        faulty_call.ranks, "agent", scratch, try_all_faults, scratch / str(abs(hash(faulty_call))), faulty_call, every
    ) as job:
        if not job.wait_until(lambda: len(job.outcomes) == faulty_call.ranks, MAX_SECONDS):
            return Tally(violations=[f"{faulty_call}: the ranks hang"])
        tally: Tally = job.outcomes[0].result or Tally(
            violations=[f"{end.error}: {end.message}" for end in job.outcomes.values()]
        )
    return Tally(tally.calls, tally.outcomes, [f"{faulty_call}: {violation}" for violation in tally.violations])


def main() -> int:
    """Run all saves and loads, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.faults", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="directory to save in (default: a temporary one)")
    parser.add_argument("--every", type=int, default=1, help="try only every n-th fault (default: 1)")
    parser.add_argument("--only", default="", help="only saves and loads whose names contain this text")
    options = parser.parse_args()
    chosen = [faulty_call for faulty_call in FAULTY_CALLS if options.only in str(faulty_call)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        work = partial(try_faults_in_job, scratch=Path(folder), every=options.every)
        results = list(case_runner.run_cases(chosen, work, 2))
    rows = []
    for faulty_call, tally in results:
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in tally.outcomes.most_common())
        rows.append((faulty_call, tally.calls, tally.outcomes.total() + len(tally.violations), outcomes))
    print(case_runner.format_table(("save or load; the faulty rank", "calls", "faults", "outcomes"), rows))
    print(f"\n{sum(row[2] for row in rows)} faults, {time.monotonic() - started:.0f} s")
    return case_runner.report_violations([violation for _, tally in results for violation in tally.violations])


if __name__ == "__main__":
    sys.exit(main())
