"""Readers of checkpoints, in rankless's own format and in those of other systems.

Each format has a module or package of its own and implements the protocol :class:`rankless.formats.reader.Reader`: a
reader says in which file ranges the bytes of each tensor are stored, and the engine reads them.

A reader is opened by each rank that needs it, in one thread, and changes nothing.
"""
