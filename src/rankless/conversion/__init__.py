"""Conversion of checkpoints between formats: the selection of tensors, the targets and the pipeline.

:func:`rankless.convert`, ``rankless convert`` and exports call it, on all ranks of a job or in one process.
"""
