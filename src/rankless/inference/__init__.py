"""Weights for inference engines: a model's own ``load_weights`` decides which bytes are read."""
