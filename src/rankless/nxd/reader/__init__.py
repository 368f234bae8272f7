"""Checkpoints of AWS NeuronX Distributed (NxD): one file for each rank, or one for each of its tensors.

``formats/registry.py`` names the reader; each rank of a load opens it, and rank 0 of a conversion to NxD reads its
output back with it. Nothing in the files is executed.
"""
