"""Optimizers: every kind of state between all pairs of layouts, and the optimizers of many packages, by name."""
