"""Weights for inference engines: a model's own ``load_weights`` decides which bytes are read.

Engines call :func:`rankless.open_weights` on every rank, by the plugins :mod:`rankless.vllm` and :mod:`rankless.sglang`
or by themselves.

Nothing here knows a layout, a quantisation or a name of an engine. The way of a tensor:

- :mod:`~rankless.inference.lazy_tensor`: what the engine's loader does with it;
- :mod:`~rankless.inference.pending_copies`: the elements to copy;
- :mod:`~rankless.inference.weights_loader`: when they are copied;
- :mod:`~rankless.inference.read_rounds`: which rank reads them;
- :mod:`~rankless.inference.joined_reads`: which bytes of the files are read, mapped or exchanged.

Blocks that a rank has read whole are compared by it, all others in the vote at the end of the block. Without checksums
in the files nothing is hashed, and the report says so.
"""
