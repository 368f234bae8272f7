"""Crash campaign: simulates a crash at every disk operation of a save and examines the state that it leaves.

It proves "Crash anywhere" of ``docs/failure-model.md``: a crash leaves the old or the new checkpoint, bit for bit.
"""
