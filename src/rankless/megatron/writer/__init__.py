"""The conversion target ``megatron``: an iteration of Megatron-Core's ``torch_dist``."""
