"""Saves a checkpoint: checks the request, agrees on a plan, writes, commits; in the background if asked.

:class:`~rankless.run_directory.RunDirectory` makes the request, and :mod:`rankless.save.background` runs the save on
every rank, in the thread of the caller or in one of its own.
"""
