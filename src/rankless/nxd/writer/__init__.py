"""Writes checkpoints in NxD's format, and converts ZeRO-1 checkpoints offline.

A conversion to NxD runs it on rank 0, :mod:`rankless.nxd.offline_zero_conversion` in its process.
"""
