"""What ``torch.distributed.checkpoint`` writes: chunks of tensors in files of ranks, and metadata that tells where."""
