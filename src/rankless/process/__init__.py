"""State of the Python process that a save or load depends on: its exit, its garbage collector."""
