"""What ``torch.save`` writes: a zip file of a pickle and of the raw bytes of storages."""
