"""Mutants: one change to the source at random, and the tests that reach it must fail.

Each mutant that survives all tests is a missing test, or a change that no caller can notice.
"""
