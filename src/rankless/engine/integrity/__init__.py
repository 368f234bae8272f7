"""Checksums: combined across ranks, compared between replicas, verified on load."""
