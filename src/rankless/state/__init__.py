"""Conversion between training objects and named tensors and plain values. No file is touched here."""
