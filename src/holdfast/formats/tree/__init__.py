"""The trees in other systems' checkpoints, put where ours have things: models, optimizers, schedulers, values."""
