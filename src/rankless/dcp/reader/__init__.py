"""The format of ``torch.distributed.checkpoint``: each rank's file has chunks of tensors, the metadata locates them."""
