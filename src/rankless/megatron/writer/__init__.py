"""The conversion target ``megatron``: an iteration of Megatron-Core's ``torch_dist``.

A conversion makes the target on every rank; the files must be those that Megatron loads.
"""
