"""Readers of DeepSpeed's checkpoints: ZeRO partitions, pipeline stages, experts, and universal checkpoints.

Source: ``runtime/engine.py``, ``runtime/zero``, ``runtime/bf16_optimizer.py``, ``runtime/pipe/module.py`` and
``checkpoint`` of DeepSpeed 0.19.8.

``formats/registry.py`` names the reader: each rank of a load or conversion opens it. Nothing in the files is executed.
"""
