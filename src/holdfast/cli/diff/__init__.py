"""The command ``holdfast diff``: compares two checkpoints."""
