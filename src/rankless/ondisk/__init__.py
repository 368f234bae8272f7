"""Format v1: the encoding of a checkpoint as bytes. Pure functions and schemas; this package opens no file.

The specification for readers in other languages is ``docs/format.md``.
"""
