"""A disk that fails at any call: all ranks raise one error, or nothing is wrong."""
