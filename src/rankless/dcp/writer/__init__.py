"""Writes folders of ``torch.distributed.checkpoint`` in conversions."""
