"""Weights for inference engines: a model's own ``load_weights`` decides which bytes are read.

Engines call :func:`rankless.open_weights` on every rank, by the plugins :mod:`rankless.vllm` and :mod:`rankless.sglang`
or by themselves.
"""
