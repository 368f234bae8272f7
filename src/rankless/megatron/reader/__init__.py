"""Checkpoints of Megatron-LM and megatron-core: folders of ``torch_dist``, and of files of ranks (``torch``).

Each rank of a load or conversion opens them. Nothing in the files is executed, and files that cannot be proved are
refused.
"""
