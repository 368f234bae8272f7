"""Models: their tensors by name, for every kind of sharding."""
