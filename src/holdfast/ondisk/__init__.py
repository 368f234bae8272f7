"""Format v1: what the bytes of a checkpoint mean. Pure functions and schemas; no file is opened here.

The specification for readers in other languages is ``docs/format.md``.
"""
