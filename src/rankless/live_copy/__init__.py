"""Copies the training state between running ranks, without files: negotiation, matching, transfer, result.

:func:`rankless.copy_state` runs all of it on every rank, in the thread of the caller.
"""
