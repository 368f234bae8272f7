"""Checkpoints of other systems, and our own: one module each, behind the protocol in ``reader``.

A reader says where the bytes of each tensor lie; the engine moves them.
"""
