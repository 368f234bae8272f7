"""Readers of checkpoints, in rankless's own format and in other systems' formats.

Each format has a module or package of its own and implements the protocol :class:`rankless.formats.reader.Reader`: a
reader returns the file ranges of each tensor's bytes, and the engine reads them.

A reader is opened by each rank that needs it, in one thread, and changes nothing.
"""
