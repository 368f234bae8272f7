"""Checkpoints of Megatron-LM and megatron-core: folders of ``torch_dist``, and of files of ranks (``torch``)."""
