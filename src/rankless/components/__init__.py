"""Saving and loading of single components: a model, an optimizer or a scheduler in its own file or folder.

The functions of the API call them on every rank; a save runs in :mod:`rankless.save.background`, like a save of a
checkpoint.
"""
