"""Logs, events, progress bars and warnings.

All layers above ``ondisk`` use it; none of it may change the behaviour of a save or load.
"""
