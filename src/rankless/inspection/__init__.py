"""The metadata of a checkpoint without its tensors, and the comparison of two checkpoints."""
