"""Conversion of checkpoints between formats: the selection of tensors, the targets and the pipeline."""
