"""Skips the tests of this folder where DeepSpeed is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
