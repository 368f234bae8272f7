"""Logs, events, progress bars and warnings.

All layers above ``ondisk`` use it; none of it may change what a save or load does.
"""
