"""Shared code of the campaigns: jobs whose ranks can be killed, a state to save, points of a save, tables."""
