"""The text that a folder of the tier knows its job by.

It has the number of the job's announcement, the token of the run directory, which stays the same if that is moved, and
random digits.

Rank 0 makes the text when it announces the job (:mod:`rankless.tier.job`), and every host writes it into its folder.
Other jobs parse it there, so its form must stay.
"""

from __future__ import annotations

import re

_JOB = re.compile(r"(?P<number>\d{8})-(?P<run>[0-9a-f]*)-[0-9a-f]+")


def name_job(number: int, run_token: str, token: str) -> str:
    """Return the text of a job.

    For example, ``00000003-0123abcd-4567cdef``: the number, the token of the run, and the job's own token.
    """
    return f"{number:08d}-{run_token}-{token}"


def parse_job_number(job: str) -> int:
    """Return the number of the announcement of a job from its text; 0 if it is none.

    For example, 3 for ``00000003-0123abcd-4567cdef``.
    """
    match = _JOB.fullmatch(job)
    return 0 if match is None else int(match["number"])


def parse_run_token(job: str) -> str:
    """Return the token of the run directory of a job from its text; "" if it is none.

    For example, ``0123abcd`` for ``00000003-0123abcd-4567cdef``.
    """
    match = _JOB.fullmatch(job)
    return "" if match is None else match["run"]
