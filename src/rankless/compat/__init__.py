"""Checkpoint functions of other systems, under their original names: see NOTICE."""
