"""Detection of ranks that die between saves.

:func:`rankless.watch` and :func:`rankless.preemption` start a thread on each rank.
"""
