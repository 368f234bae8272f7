"""Writes checkpoints in NxD's format, and converts ZeRO-1 checkpoints offline."""
