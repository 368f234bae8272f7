"""Moves bytes between tensors, files and ranks, as a plan says."""
