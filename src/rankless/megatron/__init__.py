"""Checkpoints of Megatron-LM: ``reader`` reads them, ``writer`` writes ``torch_dist``. Neither needs Megatron.

``formats/registry.py`` names the reader and the writer, for loads and conversions.
"""
