"""Optimizers: their states by parameter name, and their parameter groups."""
