"""Sizes that other systems fail at: a model larger than a rank's share of memory, a tensor larger than 2 GiB."""
