"""Stores with the API of Amazon S3."""
