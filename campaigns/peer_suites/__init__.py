"""The test suites of other projects, run with rankless underneath.

Their code is not in this repository: unpack an sdist, or a copy of their repository, and name the folder of the tests.
Each module here is a plugin of pytest, which puts rankless in the place of what a suite tests::

    python -m campaigns.peer_suites lightning FOLDER --format native

The counts and the reason of each failure are in ``docs/peer-suites.md``.
"""
