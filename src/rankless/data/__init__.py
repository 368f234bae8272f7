"""Data loading with a position that does not depend on the number of ranks.

A training makes a loader on each rank, and passes it to saves and loads as ``dataloader=``.
"""
