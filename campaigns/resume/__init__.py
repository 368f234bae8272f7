"""Exact-resume campaign: trainings are killed or told to stop at random moments, and resume.

It proves the promises of ``docs/guides/exact-resume.md``.
"""
