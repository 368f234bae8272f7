"""Plan, write, read, commit: the engine moves byte ranges and knows nothing of models or optimizers."""
