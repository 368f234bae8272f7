"""Checkpoints of AWS NeuronX Distributed (NxD): one file for each rank, or one for each of its tensors."""
