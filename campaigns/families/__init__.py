"""Round trips of transformers' model families through rankless, plain and under FSDP2."""
