"""Checkpoints of Megatron-LM: ``reader`` reads them, ``writer`` writes ``torch_dist``. Neither needs Megatron."""
