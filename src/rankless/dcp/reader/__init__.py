"""The format of ``torch.distributed.checkpoint``: each rank's file has chunks of tensors, the metadata locates them.

Loads, conversions and the readers of other systems open it on each rank; none of it imports torch.
"""
