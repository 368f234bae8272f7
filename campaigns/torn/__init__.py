"""Torn-snapshot campaign: everything passed to an asynchronous save changes right after the call.

It proves "Never torn" of ``docs/failure-model.md``: the checkpoint has the state at the call, bit for bit.
"""
