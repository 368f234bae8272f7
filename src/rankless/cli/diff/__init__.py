"""The command ``rankless diff``: compares two checkpoints."""
