"""Weights of tiny models of many architectures, loaded into the classes of a real vLLM, rank by rank."""
