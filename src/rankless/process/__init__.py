"""State of the Python process that a save or load depends on: its exit, its garbage collector.

Saves, loads and watches use it, each in its own process; nothing here talks to other ranks.
"""
