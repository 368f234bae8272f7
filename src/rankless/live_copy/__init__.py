"""Copies the training state between running ranks, without files: negotiation, matching, transfer, result."""
