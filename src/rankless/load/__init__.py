"""Loads a checkpoint: selects one, plans the reads, fills the tensors, reports the result."""
