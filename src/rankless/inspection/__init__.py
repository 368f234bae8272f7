"""The metadata of a checkpoint without its tensors, and the comparison of two checkpoints.

Commands, notebooks and reports use it, in one process; the statistics of saves run on rank 0. It holds no votes.
"""
