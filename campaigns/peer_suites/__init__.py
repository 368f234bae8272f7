"""The test suites of other projects, run with rankless underneath.

Their code is not in this repository: unpack an sdist, or a copy of their repository. Each module here is a plugin of
pytest, which puts rankless in the place of what a suite tests. In the folder of the tests, with this repository on
``PYTHONPATH``::

    python -m pytest -p campaigns.peer_suites.lightning_plugin --rankless native checkpointing/test_model_checkpoint.py

The counts and the reason of each failure are in ``docs/peer-suites.md``.
"""
