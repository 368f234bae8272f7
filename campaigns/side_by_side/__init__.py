"""Concurrency campaign: several jobs save into, overwrite, remove from and read one run's directory.

It proves "Jobs side by side" of ``docs/failure-model.md``: no reader sees a mixture of two checkpoints.
"""
