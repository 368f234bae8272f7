"""Sorting the trees of other systems' checkpoints into components: models, optimizers, schedulers, other values."""
