"""Fuzzing campaign: randomly changed checkpoints of every format must be read or refused with a typed error.

It proves the promises of ``SECURITY.md``: no code of a file runs, and its cost is bounded.
"""
